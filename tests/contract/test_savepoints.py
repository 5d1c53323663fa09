"""Savepoints: a session goes back to one with all that its memory held, and says what it could not take back."""

from __future__ import annotations

import asyncio

import pytest

from executor_server.core import NotFound, PolicyViolation, PreconditionFailed, ProcessRequest, Reason, VariablesState
from executor_server.core.config import MIB
from tests.contract.harness import Harness, follow
from tests.contract.marks import promise
from tests.support.attacks import KILL_COPIES

WAIT_S = 20.0


@promise("savepoints")
async def test_a_session_goes_back_to_a_savepoint_any_number_of_times(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import random\nrandom.seed(7)\nf = lambda: x\nx = [1]\nfile = open('kept', 'w+')")
    taken = await session.savepoints.take()
    assert (taken.taken, [each.number for each in taken.savepoints]) == (1, [1])
    expected = (await harness.run(session, "x.append(2); file.write('abc'); print(f(), random.random())")).stdout
    for generation in (2, 3):
        back = await session.savepoints.roll_back(1)
        assert (back.generation, back.left_out, [each.number for each in back.savepoints]) == (generation, (), [1])
        done = await harness.run(
            session, "print(f(), file.tell()); x.append(2); file.write('abc')\nprint(f(), random.random())"
        )
        assert done.stdout == "[1] 0\n" + expected
        assert done.ended.variables_state is VariablesState.KEPT
        assert done.ended.generation == generation


DEATHS: dict[str, tuple[str, str, dict[str, float]]] = {
    "hard exit": ("import os; os._exit(3)", "exited", {}),
    "killed": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed", {}),
    "deaf": ("sum(iter(int, 1))", "timeout", {"wall_time_s": 0.5}),
    "deaf to its processor time": ("sum(iter(int, 1))", "cpu_limit", {"cpu_time_s": 0.3}),
}


@promise("savepoints")
@pytest.mark.parametrize("how", DEATHS)
async def test_a_step_that_ends_its_interpreter_goes_back_to_the_savepoint_before_it(
    harness: Harness, how: str
) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    code, outcome, limits = DEATHS[how]
    died = await harness.run(session, f"x = 2\n{code}", savepoint=True, **limits)
    assert (died.outcome, died.state, died.ended.savepoint) == (outcome, "rolled_back", 1)
    again = await harness.run(session, "print(x)", savepoint=True)
    assert (again.stdout, again.state, again.ended.savepoint) == ("1\n", "kept", 2)
    gone = await harness.run(session, "import os; os._exit(0)")
    assert (gone.state, gone.ended.savepoint) == ("reset", 0), "a step without one loses the variables, as ever"
    back = await session.savepoints.roll_back(2)
    assert [each.number for each in back.savepoints] == [1, 2]
    assert (await harness.run(session, "print(x)")).stdout == "1\n"


@promise("savepoints")
async def test_memory_that_ran_out_is_given_back_with_the_variables(harness: Harness) -> None:
    session = await harness.session(memory_bytes=128 * MIB)
    await harness.run(session, "x = bytearray(20 * 2**20)")
    died = await harness.run(
        session,
        "import mmap\nheld = [mmap.mmap(-1, 2**20) for _ in range(400)]\nfor each in held: each.write(b'x' * 2**20)",
        savepoint=True,
    )
    assert (died.outcome, died.state) == ("out_of_memory", "rolled_back"), died.ended
    assert (await harness.run(session, "print(len(x))")).stdout == f"{20 * MIB}\n"


@promise("savepoints")
async def test_files_of_the_workspace_go_back_too(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        """
import os
def write(path, text):
    with open(path, 'w') as file: file.write(text)
def tree():
    found = []
    for folder, folders, files in sorted(os.walk('.')):
        for name in sorted(folders + files):
            path = os.path.join(folder, name)
            if os.path.islink(path): found.append((path, os.readlink(path)))
            elif os.path.isdir(path): found.append((path, None))
            else: found.append((path, open(path).read(), oct(os.stat(path).st_mode)))
    return found
os.makedirs('d/e'); write('d/e/f', 'deep'); write('a', 'one'); write('b', 'two'); write('same', 's')
os.chmod('b', 0o640); os.symlink('a', 'link'); os.link('same', 'hard')
before = tree()
""",
    )
    taken = await session.savepoints.take()
    assert (taken.savepoints[0].files, taken.savepoints[0].file_bytes) == (8, 12)
    await harness.run(
        session,
        """
import shutil
shutil.rmtree('d'); write('d', 'now a file'); write('a', 'changed'); os.remove('b'); os.remove('link')
os.mkdir('link'); write('link/x', 'x'); write('new', 'n'); open('same', 'a').write('r')
""",
    )
    back = await session.savepoints.roll_back(1)
    assert back.left_out == ()
    assert (
        await harness.run(session, "print(tree() == before, os.stat('same').st_ino == os.stat('hard').st_ino)")
    ).stdout == ("True True\n")


@promise("savepoints")
async def test_a_workspace_that_is_too_large_is_left_as_it_is_and_that_is_said(harness: Harness) -> None:
    session = await harness.session_under("state.savepoint_file_bytes = 10")
    await harness.run(session, "open('large', 'w').write('x' * 11); x = 1")
    (taken,) = (await session.savepoints.take()).savepoints
    assert (taken.files, taken.left_out) == (
        0,
        ("files of the workspace: the files of the workspace have more than 10 bytes",),
    )
    await harness.run(session, "open('large', 'w').write('y'); x = 2")
    await session.savepoints.roll_back(1)
    assert (await harness.run(session, "print(x, open('large').read())")).stdout == "1 y\n"


@promise("savepoints")
async def test_threads_prevent_a_savepoint_and_what_else_is_left_out_is_said(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        """
import socket, subprocess, threading, time
listener = socket.create_server(('127.0.0.1', 8123))
child = subprocess.Popen(['sleep', '1000'])
ends = threading.Event()
thread = threading.Thread(target=ends.wait, name='counter')
thread.start()
""",
    )
    with pytest.raises(PreconditionFailed, match=r"1 threads of the program run \(counter\)") as refused:
        await session.savepoints.take()
    assert refused.value.reason is Reason.SAVEPOINT_REFUSED
    went_on = await harness.run(session, "x = 1", savepoint=True)
    assert (went_on.outcome, went_on.ended.savepoint) == ("succeeded", 0)
    assert "no savepoint before this step: 1 threads of the program run (counter)" in went_on.stderr
    await harness.run(session, "ends.set(); thread.join()")
    (taken,) = (await session.savepoints.take()).savepoints
    assert taken.left_out == ("child processes of the program: 1", "open sockets: 1")
    # The savepoint holds neither the port, nor a child that the program would meet.
    again = await harness.run(
        session,
        """
listener.close()
listener = socket.create_server(('127.0.0.1', 8123))
child.kill(); child.wait()
import os
try: os.wait()
except ChildProcessError: print('no other child')
""",
    )
    assert again.stdout == "no other child\n", again.ended
    await session.savepoints.roll_back(1)
    assert (await harness.run(session, "print(x, child.poll() is not None)")).stdout == "1 True\n"


@promise("savepoints")
async def test_the_oldest_savepoints_are_dropped_and_the_later_ones_by_a_rollback(harness: Harness) -> None:
    session = await harness.session_under("state.savepoints = 3")
    for number in range(1, 6):
        await harness.run(session, f"x = {number}")
        taken = await session.savepoints.take()
        assert (taken.taken, taken.dropped) == (number, int(number > 3))
    with pytest.raises(NotFound, match="no savepoint 2; available: 3, 4, 5") as refused:
        await session.savepoints.roll_back(2)
    assert refused.value.reason is Reason.SAVEPOINT_NOT_FOUND
    back = await session.savepoints.roll_back(4)
    assert ([each.number for each in back.savepoints], back.dropped) == ([3, 4], 1)
    assert (await harness.run(session, "print(x)")).stdout == "4\n"
    assert (await session.savepoints.take()).taken == 6, "no number is used twice"
    await harness.change_policy(session, "state.savepoints = 0")
    with pytest.raises(PolicyViolation):
        await session.savepoints.take()
    with pytest.raises(PolicyViolation):
        await harness.run(session, "x", savepoint=True)


@promise("savepoints")
async def test_a_program_that_ends_its_savepoints_loses_them_and_nothing_else(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    await session.savepoints.take()
    killed = await harness.run(session, KILL_COPIES + "x = 2")
    assert killed.state == "kept"
    async with asyncio.timeout(WAIT_S):
        while (await session.savepoints.listed()).savepoints:
            pass
    with pytest.raises(NotFound):
        await session.savepoints.roll_back(1)
    assert (await harness.run(session, "print(x)")).stdout == "2\n"


@promise("savepoints")
async def test_rules_tools_and_processes_are_those_of_now_after_a_rollback(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    await session.savepoints.take()
    await session.processes.start(ProcessRequest("p", ("sleep", "1000")))
    tool = {"ask": lambda: 42}
    assert (await harness.run_with_tools(session, "x = 2; print(ask())", tool)).stdout == "42\n"
    await session.savepoints.roll_back(1)
    assert (await harness.run_with_tools(session, "print(x, ask())", tool)).stdout == "1 42\n"
    sleeping = "print([p for p in os.listdir('/proc') if p.isdigit() and 'sleep' in open(f'/proc/{p}/cmdline').read()])"
    assert (await harness.run(session, f"import os\n{sleeping}")).stdout != "[]\n"
    assert (await harness.run(session, "import asyncio\nawait asyncio.sleep(0)\nprint('loop')")).stdout == "loop\n"


@promise("savepoints")
async def test_a_rollback_does_not_take_the_policy_and_the_budgets_back(harness: Harness) -> None:
    session = await harness.session_under("", imports=("json", "math"), session_operations=1000)
    await harness.run(session, "x = 1")
    await session.savepoints.take()
    await harness.run(session, "for n in range(500): pass")
    await harness.change_policy(session, 'imports.allowed = ["math"]')
    await session.savepoints.roll_back(1)
    assert (await harness.run(session, "import json")).outcome == "import_denied"
    assert (await harness.run(session, "import math\nx")).output == 1
    spent = await harness.run(session, "for n in range(700): pass")
    assert spent.outcome == "operation_limit", "what was spent before the rollback stays spent"


@promise("savepoints")
async def test_a_full_table_of_processes_has_no_room_for_a_savepoint(harness: Harness) -> None:
    session = await harness.session(processes=16)
    await harness.run(
        session,
        """
import subprocess
children = []
try:
    while len(children) < 64: children.append(subprocess.Popen(['sleep', '1000']))
except OSError: pass
""",
    )
    with pytest.raises(PreconditionFailed, match="no process could be made for it") as refused:
        await session.savepoints.take()
    assert refused.value.reason is Reason.SAVEPOINT_REFUSED
    await harness.run(session, "for child in children: child.kill(); child.wait()")
    assert (await session.savepoints.take()).taken == 1


@promise("savepoints")
async def test_an_event_loop_is_a_new_one_and_what_waited_on_the_old_one_is_gone(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import asyncio\ndone = []\nasync def wait():\n    await asyncio.sleep(0.01); done.append(1)\n"
        "task = asyncio.ensure_future(wait())\nawait asyncio.sleep(0)",
    )
    (taken,) = (await session.savepoints.take()).savepoints
    assert taken.left_out == ()
    await session.savepoints.roll_back(1)
    again = await harness.run(session, "await asyncio.sleep(0.05)\nprint(done, task.done())")
    assert (again.outcome, again.stdout) == ("succeeded", "[] False\n")


@promise("savepoints")
async def test_a_savepoint_and_a_rollback_wait_for_what_runs(harness: Harness) -> None:
    session = await harness.session()
    running = await harness.begin(session, "import time\nx = 1\ntime.sleep(0.3)\nx = 2")
    taken = await session.savepoints.take()
    assert (await follow(running)).outcome == "succeeded"
    running = await harness.begin(session, "x = 3\ntime.sleep(0.3)\nx")
    await session.savepoints.roll_back(taken.taken)
    ended = await follow(running)
    assert (ended.outcome, ended.output, ended.state) == ("succeeded", 3, "kept")
    assert (await harness.run(session, "x")).output == 2, "the savepoint holds what the first program has left"


@promise("savepoints")
async def test_savepoints_are_dropped_when_memory_is_short(harness: Harness) -> None:
    """A copy that a program makes by writing fits beside those that are kept, or the program would be out of memory."""
    session = await harness.session(memory_bytes=256 * MIB)
    await harness.run(session, "import os\nx = bytearray(os.urandom(2**20)) * 40")
    dropped = 0
    for number in range(1, 8):
        await harness.run(session, f"for at in range(0, len(x), 4096): x[at] = {number}")
        try:
            dropped += (await session.savepoints.take()).dropped
        except PreconditionFailed as refused:
            assert "the sandbox has too little memory left" in refused.message
    left = (await session.savepoints.listed()).savepoints
    assert len(left) < 7, "seven copies of 40 MiB do not fit into 256 MiB"
    assert (await harness.run(session, "x[0], len(x)")).output == (7, 40 * MIB)
    if left:
        await session.savepoints.roll_back(left[-1].number)
        assert (await harness.run(session, "x[0]")).output == left[-1].number


@promise("savepoints")
async def test_a_step_that_went_back_can_go_back_again_and_again(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 0; open('f', 'w').write('0')")
    for number in range(1, 4):
        died = await harness.run(
            session, "x += 1; open('f', 'w').write('gone')\nimport os; os._exit(1)", savepoint=True
        )
        assert (died.state, died.ended.savepoint, died.ended.generation) == ("rolled_back", number, number + 1)
    assert (await harness.run(session, "print(x, open('f').read())")).stdout == "0 0\n"


@promise("savepoints")
async def test_a_savepoint_outlives_the_process_that_was_made_ahead_to_go_on_from_it(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "x = 1")
    await session.savepoints.take()
    killed = await harness.run(
        session,
        """
import os, signal, time
def others():
    found = []
    for name in os.listdir('/proc'):
        if name.isdigit() and int(name) not in (1, os.getpid()):
            try: stat = open(f'/proc/{name}/stat').read().rpartition(')')[2].split()
            except OSError: continue
            if int(stat[1]) == 1 and int(stat[3]) == int(name): found.append(int(name))
    return sorted(found)
while len(others()) < 3: time.sleep(0.01)
checker, savepoint, ahead = others()
os.kill(ahead, signal.SIGKILL)
x = 2
""",
    )
    assert killed.outcome == "succeeded", killed.ended
    for generation in (2, 3):
        back = await session.savepoints.roll_back(1)
        assert (back.generation, [each.number for each in back.savepoints]) == (generation, [1])
        assert (await harness.run(session, "x")).output == 1
