"""Process 1 of the sandbox, attacked by code of its own user. Each attack is tried on an own process too, where it works."""

from __future__ import annotations

import json
import re
import time

import pytest

from executor_server.guest.supervisor.output import BACKGROUND_BEGIN, BACKGROUND_END
from tests.contract.harness import Harness
from tests.support.attacks import LEADER_ONLY

_ATTACKS = """
import ctypes, json, os, resource, signal, subprocess, sys, time
libc = ctypes.CDLL(None, use_errno=True)

def call(name, *arguments):
    ctypes.set_errno(0)
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def read(name):
    def attack(pid):
        with open(f"/proc/{pid}/{name}", "rb") as file:
            file.read(1)
    return attack

def write(name, text):
    def attack(pid):
        fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)
    return attack

def take_descriptor(pid):
    if libc.syscall(438, os.pidfd_open(pid), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")

attacks = {
    "memory": lambda pid: open(f"/proc/{pid}/mem", "rb").close(),
    "maps": read("maps"),
    "environment": read("environ"),
    "descriptors": lambda pid: os.listdir(f"/proc/{pid}/fd"),
    "root": lambda pid: os.listdir(f"/proc/{pid}/root/"),
    "working directory": lambda pid: os.readlink(f"/proc/{pid}/cwd"),
    "limits": lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (4000, 4000)),
    "priority": lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
    "scheduler": lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0)),
    "affinity": lambda pid: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))}),
    "oom score": write("oom_score_adj", b"1000"),
}
impossible = {
    "timer slack": write("timerslack_ns", b"4000000000"),
    "name": write("comm", b"x"),
    "trace": lambda pid: call("ptrace", 16, pid, 0, 0),
    "peek": lambda pid: call("process_vm_readv", pid, 0, 0, 0, 0, 0),
    "a descriptor of it": take_descriptor,
    "priority of all": lambda pid: os.setpriority(os.PRIO_USER, 0, 19),
}

def result(attack, pid):
    try:
        attack(pid)
    except OSError as error:
        return type(error).__name__
    return "done"

own = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
report = {name: [result(attack, 1), result(attack, own.pid)] for name, attack in attacks.items()}
report.update({name: [result(attack, 1), None] for name, attack in impossible.items()})
own.kill()
own.wait()
print(json.dumps(report))
"""


async def test_the_supervisor_is_closed_to_those_it_supervises(harness: Harness) -> None:
    session = await harness.session()
    ran = await harness.run(session, _ATTACKS)
    report = json.loads(ran.stdout)
    assert {name: supervisor for name, (supervisor, _) in report.items() if supervisor != "PermissionError"} == {}
    assert {name: own for name, (_, own) in report.items() if own not in ("done", None)} == {}, "the controls"
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_no_signal_reaches_the_supervisor(harness: Harness) -> None:
    session = await harness.session()
    ran = await harness.run(
        session,
        """
import os, signal
for number in signal.valid_signals():
    os.kill(1, number)
    signal.pidfd_send_signal(os.pidfd_open(1), number)
'still here'
""",
    )
    assert ran.output == "still here"
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_programs_that_take_all_processor_time_keep_no_deadline_waiting(harness: Harness) -> None:
    """Once they could make the supervisor yield to them, a deadline of 2 s came after 12 and a kill after half a minute."""
    session = await harness.session(wall_time_s=0.5, operations=10**12)
    started = time.monotonic()
    ran = await harness.run(
        session,
        """
import os
for give_way in (lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)), lambda: os.setpriority(0, 1, 19)):
    try:
        give_way()
    except PermissionError:
        pass
for _ in range(20):
    if os.fork() == 0:
        break
while True:
    pass
""",
    )
    assert ran.outcome == "timeout"
    await harness.manager.delete(session.owner, session.session_id)
    assert time.monotonic() - started < 20


@pytest.mark.parametrize("signal_number", [9, 19], ids=["killed", "stopped"])
async def test_attacks_on_the_checker_cost_no_execution(harness: Harness, signal_number: int) -> None:
    session = await harness.session(wall_time_s=1.0)
    attack = f"{LEADER_ONLY}\nfor pid in others:\n    os.kill(pid, {signal_number})\nlen(others)"
    assert (await harness.run(session, attack)).output == 1
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_processes_that_take_the_place_of_the_checker_cost_only_their_program(harness: Harness) -> None:
    """A new checker needs a place, so all of them are killed, and the interpreter with them.

    Its end was not noticed: the next execution waited for it until its time was over, and then the sandbox was lost.
    """
    session = await harness.session(processes=24, wall_time_s=10.0)
    taken = await harness.run(
        session,
        f"""{LEADER_ONLY}
import signal
(checker,) = others
full, is_full = os.pipe()
if os.fork() == 0:
    def fill():
        made = 0
        try:
            while True:
                if os.fork() == 0:
                    signal.pause()
                made += 1
        except BlockingIOError:
            return made
    fill()
    os.kill(checker, signal.SIGKILL)
    while not fill():
        pass
    os.write(is_full, b"1")
    signal.pause()
os.read(full, 1)
""",
    )
    assert (taken.outcome, taken.output) == ("succeeded", b"1")
    after = await harness.run(session, "40 + 2")
    assert (after.outcome, after.output) == ("succeeded", 42)


async def test_what_a_program_leaves_running_is_heard_apart_and_goes_with_the_session(harness: Harness) -> None:
    session = await harness.session()
    ran = await harness.run(
        session,
        """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            os.write(1, b"ghost")
    os._exit(0)
os.wait()
print("mine")
""",
    )
    # A long output is cut in the middle of a word.
    assert re.sub("[ghost]", "", ran.stdout) == "mine\n"
    for _ in range(5):  # every test checks that no process outlives the session
        later = await harness.run(session, "print('mine')")
        assert (later.outcome, later.output) == ("succeeded", None)
        pieces = re.split(f"{re.escape(BACKGROUND_BEGIN)}\n|{re.escape(BACKGROUND_END)}\n", later.stdout)
        assert "".join(pieces[::2]) == "mine\n", "what others print is marked"


async def test_a_prelude_that_fails_with_text_that_nothing_can_carry_ends_no_result(harness: Harness) -> None:
    """It failed between the end of a run and its result, and the result was never sent."""
    prelude = "import os\nif os.path.exists('bad'): raise ValueError('\\ud800')"
    session = await harness.session(prelude=prelude)
    assert (await harness.run(session, "open('bad', 'w').close()\nimport os\nos._exit(1)")).outcome == "exited"
    ran = await harness.run(session, "40 + 2")
    assert (ran.output, ran.outcome) == (42, "succeeded")
    assert "the prelude ended as exception" in ran.stderr + (await harness.run(session, "1")).stderr


async def test_odd_files_do_not_break_a_listing(harness: Harness) -> None:
    session = await harness.session(wall_time_s=20.0)
    await harness.run(
        session,
        """
import os
open("far", "w").close()
os.utime("far", (2**45, 2**45))
open("long ago", "w").close()
os.utime("long ago", (-2**45, -2**45))
open(b"\\xff\\xfe", "w").close()
os.mkfifo("fifo")
os.symlink("/", "link")
os.mkdir("deep")
os.chdir("deep")
for _ in range(40):
    os.mkdir("d" * 200)
    os.chdir("d" * 200)
""",
    )
    files, truncated = await session.list_files("")
    assert {"far", "long ago", "deep"} <= {file.path for file in files}
    assert truncated  # a name is no text, and directories are too deep
    assert all(len(file.path) <= 4096 for file in files)
    assert (await harness.run(session, "40 + 2")).output == 42


async def test_a_directory_of_very_many_things_is_listed_in_part(harness: Harness) -> None:
    session = await harness.session(wall_time_s=20.0)
    await harness.run(session, "import os\nfor number in range(30_000):\n    os.symlink('x', str(number))")
    files, truncated = await session.list_files("")
    assert 0 < len(files) <= 10_000 and truncated
