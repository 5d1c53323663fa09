"""Kernel sessions: the processes that belong together, found in /proc.

Every process that a call starts leads a kernel session. A child is in its parent's session until it makes its own
(setsid). No process can enter an existing session, so all processes in a session descend from its leader.
"""

from __future__ import annotations

import os
import time

from ..wire.lean import signal
from ..wire.proc import CSTIME, FLAGS, SESSION, STATE, THREADS, UTIME, pids, seconds, stat_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Set

_ENDED = (b"Z", b"X")
_STOPPED = (b"T", b"t")
_PF_EXITING = 0x4
# Scans that may find new processes. Each scan stops the processes it finds. By then a fork bomb has reached its limit,
# because stopped processes count.
_STOP_ROUNDS = 256
# Scans of the processes of one kernel session. Each scan kills the processes it finds.
_KILL_ROUNDS = 64
# Seconds for processes to end after they were killed, and between two scans.
_END_TIME_S = 10.0
_END_STEP_S = 0.0002


def cpu_s(leaders: Set[int]) -> float:
    """Returns the CPU seconds of the processes in some kernel sessions, with those of children they waited for."""
    return sum(
        seconds(stat, UTIME, CSTIME)
        for _, stat in _processes()
        if int(stat[SESSION]) in leaders and stat[STATE] not in _ENDED
    )


def leaders() -> frozenset[int]:
    """Returns the kernel sessions of all processes but this one."""
    return frozenset(int(stat[SESSION]) for _, stat in _processes())


def signal_session(leader: int, number: int) -> None:
    """Sends a signal to every process of a kernel session."""
    for pid, stat in _processes():
        if int(stat[SESSION]) == leader:
            send(pid, number)


def kill_session(leader: int) -> None:
    """Kills every process of a kernel session, and those that they start meanwhile.

    Attack: a program forks while /proc is read, and the scan misses the child. A process with a pending SIGKILL can't
    complete a fork, so all are killed once a scan finds no others.
    """
    killed: set[int] = set()
    for _ in range(_KILL_ROUNDS):
        members = {pid for pid, stat in _processes() if int(stat[SESSION]) == leader}
        if members <= killed:
            return
        if leader in members:
            # The leader's group first, and together: if its child were killed first, a shell would continue, and end
            # with success.
            send_group(leader, signal.SIGKILL)
        for pid in members - killed:
            send(pid, signal.SIGKILL)
        killed |= members


def send(pid: int, number: int) -> None:
    """Sends a signal to one process, if it has not ended."""
    assert pid > 1, f"a signal to process {pid}"
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def send_group(leader: int, number: int) -> None:
    """Sends a signal to a process group, if any of it is left."""
    assert leader > 1, f"a signal to the group of process {leader}"
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        pass


def kill_all_but(leaders: Set[int]) -> bool:
    """Kills every process of the sandbox but those of some kernel sessions, and waits until none of them runs.

    They may still have files, ports and memory then, which the kernel needs some milliseconds to free (`await_end`).
    Returns False if not all could be killed: then the caller kills everything (`kill(-1)`), which no program outruns.

    Attack: a program that forks faster than /proc is read would always outrun a list. So processes that the first scan
    did not find are stopped, and killed once a scan finds no other running process. A process with either signal
    pending can't complete a fork, and a stopped one still counts against the limit of processes.
    """
    stopped: set[int] = set()
    killed: set[int] = set()
    ends_s, rounds = time.monotonic() + _END_TIME_S, 0
    while time.monotonic() < ends_s and rounds < _STOP_ROUNDS:
        others = {pid: stat for pid, stat in _others(leaders) if not _is_exiting(stat)}
        if not others:
            return True
        left = others.keys() - killed
        running = {pid for pid in left if others[pid][STATE] not in _STOPPED}
        for pid in running or left:
            at_once = not killed or not running or pid in stopped  # a program can continue what was stopped
            send(pid, signal.SIGKILL if at_once else signal.SIGSTOP)
            (killed if at_once else stopped).add(pid)
        rounds += bool(left)
        if not left:
            time.sleep(_END_STEP_S)
    return False


def await_end(leaders: Set[int]) -> bool:
    """Waits until all processes but those of some kernel sessions have ended; false if that takes too long."""
    ends_s = time.monotonic() + _END_TIME_S
    while any(not _has_ended(stat) for _, stat in _others(leaders)):
        if time.monotonic() > ends_s:
            return False
        time.sleep(_END_STEP_S)
    return True


def _has_ended(stat: list[bytes]) -> bool:
    """True if all threads have ended: the state is that of the first one, which can end before the others."""
    return stat[STATE] in _ENDED and int(stat[THREADS]) <= 1


def _is_exiting(stat: list[bytes]) -> bool:
    """True if the process no longer runs code of a program."""
    return int(stat[THREADS]) <= 1 and (stat[STATE] in _ENDED or int(stat[FLAGS]) & _PF_EXITING != 0)


def _others(leaders: Set[int]) -> list[tuple[int, list[bytes]]]:
    return [(pid, stat) for pid, stat in _processes() if int(stat[SESSION]) not in leaders]


def _processes() -> list[tuple[int, list[bytes]]]:
    """Returns every process but this one, with its stat."""
    return [(pid, stat) for pid in pids() if (stat := stat_of(pid)) is not None]
