"""Kernel sessions: the processes that belong together, found in /proc.

Every process that a call starts is the leader of a kernel session. A child is in the session of its parent until it
makes one of its own (setsid). No process can enter a session that is there, so what is found in one was started by its
leader, however often it has forked.
"""

from __future__ import annotations

import os
import time

from ..wire.lean import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set
    from typing import Callable

# Fields of proc(5)'s stat, counted from the state, which is field 3.
_STATE, _SESSION, _UTIME, _CSTIME = 0, 3, 11, 14
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_ENDED = (b"Z", b"X")
_STILL = (b"T", b"t", *_ENDED)
# Looks at the processes until all that are not spared stand still. Each one stops what it finds; a program that forks
# without end is at its limit of processes by then and can't start another, as stopped ones count.
_STOP_ROUNDS = 256
# The same for the processes of one kernel session, each look killing what it finds.
_KILL_ROUNDS = 64
# Seconds for them to end after they were killed, and between two looks.
_END_TIME_S = 10.0
_END_STEP_S = 0.0005


def cpu_s(leaders: Set[int]) -> float:
    """Returns the CPU seconds of what lives in some kernel sessions, with those of children that were waited for."""
    ticks = 0
    for _, stat in _processes():
        if int(stat[_SESSION]) in leaders and stat[_STATE] not in _ENDED:
            ticks += sum(int(value) for value in stat[_UTIME : _CSTIME + 1])
    return ticks / _TICKS_PER_S


def leaders() -> frozenset[int]:
    """Returns the kernel sessions of all processes but this one."""
    return frozenset(int(stat[_SESSION]) for _, stat in _processes())


def signal_session(leader: int, number: int) -> None:
    """Sends a signal to every process of a kernel session."""
    for pid, stat in _processes():
        if int(stat[_SESSION]) == leader:
            send(pid, number)


def kill_session(leader: int) -> None:
    """Kills every process of a kernel session, and those that it starts meanwhile.

    Attack: a program that forks while /proc is read has a child that this look missed. A process that was sent SIGKILL
    can't complete a fork, so all are killed once a look finds only such.
    """
    killed: set[int] = set()
    for _ in range(_KILL_ROUNDS):
        members = {pid for pid, stat in _processes() if int(stat[_SESSION]) == leader}
        if members <= killed:
            return
        if leader in members:
            # First and as one: a shell whose child is killed before it would go on, and end as if all were well.
            send_group(leader, signal.SIGKILL)
        for pid in members - killed:
            send(pid, signal.SIGKILL)
        killed |= members


def send(pid: int, number: int) -> None:
    """Sends a signal to one process; nothing when it has ended."""
    assert pid > 1, f"a signal to process {pid}"
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def send_group(leader: int, number: int) -> None:
    """Sends a signal to a process group; nothing when none of it is left."""
    assert leader > 1, f"a signal to the group of process {leader}"
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        pass


def kill_all_but(leaders: Set[int], reap: Callable[[], bool]) -> bool:
    """Kills every process of the sandbox but those of some kernel sessions, and waits for their end.

    `reap` takes the exits that there are, and returns False when there is no child at all. Returns False when not all
    could be killed: then the caller kills everything (`kill(-1)`), which no program outruns.

    Attack: a program that forks faster than /proc is read would always be ahead of a list. So what the first look does
    not find is stopped before it is killed: a process that was sent either signal can't complete a fork, and a stopped
    one still counts against the limit of processes.
    """
    stopped: set[int] = set()
    killed: set[int] = set()
    for _ in range(_STOP_ROUNDS):
        running = {pid for pid, stat in _others(leaders) if stat[_STATE] not in _STILL}
        if running <= killed:
            break
        for pid in running - killed:
            at_once = not killed or pid in stopped  # a program can continue what was stopped
            send(pid, signal.SIGKILL if at_once else signal.SIGSTOP)
            (killed if at_once else stopped).add(pid)
    else:
        return False
    ends_s = time.monotonic() + _END_TIME_S
    while time.monotonic() < ends_s:
        left = [pid for pid, stat in _others(leaders) if stat[_STATE] not in _ENDED]
        for pid in left:
            send(pid, signal.SIGKILL)
        has_children = reap()
        if not left or not has_children:
            return True
        time.sleep(_END_STEP_S)
    return False


def _others(leaders: Set[int]) -> list[tuple[int, list[bytes]]]:
    return [(pid, stat) for pid, stat in _processes() if int(stat[_SESSION]) not in leaders]


def _processes() -> list[tuple[int, list[bytes]]]:
    """Returns every process but this one, with its stat."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            try:
                with open(f"/proc/{name}/stat", "rb", buffering=0) as file:
                    text = file.read()
            except OSError:
                continue  # it ended meanwhile
            # The name may hold a parenthesis or a space, so the fields start after the last parenthesis.
            found.append((int(name), text[text.rfind(b")") + 2 :].split()))
    return found
