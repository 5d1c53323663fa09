"""Processes that outlive the execution that started them go on printing, and their output is marked."""

from __future__ import annotations

from executor_server.guest.supervisor.leftover_output import BACKGROUND_BYTES
from executor_server.sessions import Session
from tests.contract.harness import Harness, Transcript, pieces
from tests.contract.marks import promise
from tests.support.polling import eventually_awaited

pytestmark = promise("stream-background")

BEGIN, END = "[background output of earlier steps]\n", "[end of background output]\n"
# Prints each line of its input, and notes in a file that it could.
_PRINTER = """\
import subprocess, sys
program = '''
import sys
for number, line in enumerate(sys.stdin):
    print(line, end="", flush=True)
    open("printed", "w").write(str(number + 1))
'''
printer = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, text=True)
def say(line):
    printer.stdin.write(line + "\\n")
    printer.stdin.flush()
"""
_PRINTED = "import os\nopen('printed').read() if os.path.exists('printed') else ''"


def _background(run: Transcript) -> str:
    """Returns the marked parts of the output."""
    return "".join(_parts(run))


def _parts(run: Transcript) -> list[str]:
    return [part.partition(END)[0] for part in run.stdout.split(BEGIN)[1:]]


async def _gather(harness: Harness, session: Session, expected: str, first: Transcript) -> str:
    """Runs small steps until all expected output was shown, unless the first showed it; returns the output."""
    shown = _background(first)

    async def step() -> bool:
        nonlocal shown
        run = await harness.run(session, "1")
        assert not run.stdout.replace(BEGIN + _background(run) + END, ""), "what is not its own is marked"
        shown += _background(run)
        return expected in shown

    assert expected in shown or await eventually_awaited(step)
    return shown


async def test_a_child_that_prints_after_its_step_lives_and_its_output_is_shown(harness: Harness) -> None:
    """Its pipe used to be closed with its step: a server died of SIGPIPE in the next one."""
    session = await harness.session()
    await harness.run(session, f"{_PRINTER}\nprint('mine')\nsay('in the same step')")
    run = await harness.run(session, "say('in the next one')\nprint('own')")
    assert run.stdout.startswith(("own\n", BEGIN))

    async def printed_both() -> bool:
        return bool((await harness.run(session, _PRINTED)).output == "2")

    assert await eventually_awaited(printed_both), "it could print both times"
    assert (await harness.run(session, "printer.poll() is None")).output is True


async def test_output_between_two_executions_is_shown_marked_with_the_next(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, f"{_PRINTER}\nimport threading\ngo = threading.Event()")
    code = "def late():\n    go.wait()\n    say('from a child')\n    print('from a thread')\n"
    await harness.run(session, f"{code}threading.Thread(target=late, daemon=True).start()")
    said = await harness.run(session, "say('first')")
    assert "first\n" in await _gather(harness, session, "first\n", said)
    run = await harness.run(session, "threading.Timer(0, go.set).start()\nprint('own')")
    assert "own\n" in run.stdout.partition(BEGIN)[0]


async def test_the_output_of_a_thread_between_two_executions_is_shown(harness: Harness) -> None:
    """Its output went to /dev/null."""
    session = await harness.session()
    code = (
        "import os, sys, threading\n"
        "def late():\n    while os.path.exists('/proc/self/fd/1') and os.readlink('/proc/self/fd/1') == mine: pass\n"
        "    print('from a thread', flush=True)\n"
        "mine = os.readlink('/proc/self/fd/1')\n"
        "threading.Thread(target=late, daemon=True).start()"
    )
    run = await harness.run(session, code)
    assert run.outcome == "succeeded"
    assert await _gather(harness, session, "from a thread\n", run) == "from a thread\n"


# Prints much when it sees the file `go`, and notes in another when all of it is written.
_PRINTER_OF_MUCH = """\
import subprocess, sys
program = '''
import os
while not os.path.exists("go"):
    pass
print("x" * 200_000 + "end", flush=True)
open("printed", "w").close()
'''
printer = subprocess.Popen([sys.executable, "-c", program])
"""


async def test_much_background_output_is_cut_and_that_is_announced(harness: Harness) -> None:
    """A step shows the output in the pipe when it begins and when it ends; each time the cut is announced."""
    session = await harness.session()
    await harness.run(session, _PRINTER_OF_MUCH)
    await session.put_file("go", 0, pieces(b""))

    async def printed() -> bool:
        return any(entry.path == "printed" for entry in (await session.list_files(""))[0])

    assert await eventually_awaited(printed)
    shown: list[str] = []

    async def step() -> bool:
        shown.extend(_parts(await harness.run(session, "1")))
        return any("xend\n" in part for part in shown)

    assert await eventually_awaited(step)
    assert max(map(len, shown)) <= BACKGROUND_BYTES + 200
    assert "bytes of it left out]\n" in shown[0], "the pipe holds less than was printed before this step"


async def test_background_output_is_charged_and_held_to_the_limit_of_the_step_that_shows_it(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, _PRINTER)
    said = await harness.run(session, "say('x' * 20000 + 'end')", output_bytes=100)
    used = said.ended.usage.output_bytes

    async def shown() -> bool:
        nonlocal used
        run = await harness.run(session, "1", output_bytes=100)
        used += run.ended.usage.output_bytes
        assert len(_background(run)) <= 200
        return "end" in run.stdout

    assert "end" in said.stdout or await eventually_awaited(shown)
    assert used >= 10_000, "what was left out of it counts"


# Prints without end when it sees the file `go`, so not in the step that starts it.
_FLOOD = """\
import subprocess, sys
program = '''
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
while True:
    print("y" * 1000)
'''
flood = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
"""


async def test_a_child_that_prints_without_end_delays_no_execution(harness: Harness) -> None:
    session = await harness.session()
    assert (await harness.run(session, _FLOOD)).outcome == "succeeded"
    await session.put_file("go", 0, pieces(b""))

    async def floods() -> bool:
        return "yyy" in _background(await harness.run(session, "1"))

    assert await eventually_awaited(floods)
    for number in range(20):
        run = await harness.run(session, f"print({number})")
        assert (run.outcome, run.ended.usage.operations) == ("succeeded", 0)
        assert f"{number}\n" in run.stdout
        assert len(run.stdout) < 3 * BACKGROUND_BYTES
    assert (await harness.run(session, "flood.poll() is None")).output is True


async def test_steps_that_each_leave_a_process_do_not_use_up_the_descriptors(harness: Harness) -> None:
    session = await harness.session(processes=64)
    await harness.run(session, "import os, subprocess, sys\nleft = []")
    sleep = "left.append(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1e6)']))"
    for _ in range(24):
        assert (await harness.run(session, sleep)).outcome == "succeeded"
    run = await harness.run(session, "sum(each.poll() is None for each in left)")
    assert run.output == 24
    assert "outputs of background processes were closed" in (await harness.run(session, sleep)).stderr + run.stderr
