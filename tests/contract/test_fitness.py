"""Damage that a program does to its interpreter is reported with that program, and reaches no other."""

from __future__ import annotations

import pytest

from tests.contract.harness import Harness, pieces
from tests.contract.marks import promise
from tests.support.polling import eventually_awaited

# name: (a program that leaves the interpreter unfit, what is said of it)
UNFIT = {
    "no descriptors": (
        "import os, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nheld = []\n"
        "try:\n    while True: held.append(os.open('/dev/null', os.O_RDONLY))\nexcept OSError:\n    pass\n'ran'",
        "file descriptors",
    ),
    "no recursion": ("import sys\nsys.setrecursionlimit(40)\n'ran'", "recursion limit"),
    "no encoder": ("import sys\nsys.modules['executor_api.values.encode'].__dict__.clear()", "its own code fails"),
    "no linecache": ("import linecache\nlinecache.cache = None\n'ran'", "linecache"),
}
CLOSES = {
    "descriptors": "import os\nfor fd in (0, 1, 2):\n    os.close(fd)",
    "both": "import sys\nsys.stdin.close()\nsys.stdout.close()\nsys.__stdin__.close()\nsys.__stdout__.close()",
}


@promise("end-unfit")
@pytest.mark.parametrize("name", sorted(UNFIT))
async def test_an_interpreter_that_is_left_unfit_is_replaced_and_that_is_reported(harness: Harness, name: str) -> None:
    """The next step of a program that used up the descriptors was EXITED 70."""
    code, why = UNFIT[name]
    session = await harness.session(prelude="prelude = 'is there'")
    assert (await harness.run(session, "kept = 1")).ended.generation == 1
    run = await harness.run(session, code)
    assert (run.state, run.ended.generation) == ("reset", 2), run.ended
    assert why in run.stderr and "the interpreter was replaced" in run.stderr
    if code.endswith("'ran'"):
        assert (run.outcome, run.output) == ("succeeded", "ran")
    after = await harness.run(session, "globals().get('kept'), prelude")
    assert (after.outcome, after.state, after.output) == ("succeeded", "kept", (None, "is there"))


@promise("end-unfit")
async def test_a_prelude_that_leaves_the_interpreter_unfit_is_left_out(harness: Harness) -> None:
    code, why = UNFIT["no descriptors"]
    session = await harness.session(
        prelude=f"if __import__('os').path.exists('now'):\n    {code.replace(chr(10), chr(10) + '    ')}"
    )
    first = await harness.run(session, "open('now', 'w').close()\nimport os\nos._exit(0)")
    assert first.state == "reset"
    run = await harness.run(session, "1")
    assert (run.outcome, run.output) == ("succeeded", 1)
    assert why in run.stderr and "the prelude is skipped" in run.stderr
    assert (await harness.run(session, "2")).state == "kept"


@promise("end-unfit")
async def test_an_interpreter_that_fails_before_a_program_is_not_reported_as_its_exit(harness: Harness) -> None:
    """A thread of an earlier step can spoil it after its step has ended."""
    session = await harness.session()
    code = (
        "import linecache, os, threading, time\n"
        "def spoil():\n    while not os.path.exists('go'): time.sleep(0.001)\n    linecache.cache = None\n"
        "    os.rename('go', 'spoilt')\n"
        "threading.Thread(target=spoil, daemon=True).start()"
    )
    assert (await harness.run(session, code)).state == "kept"
    await session.put_file("go", 0, pieces(b""))

    async def spoilt() -> bool:
        return any(entry.path == "spoilt" for entry in (await session.list_files(""))[0])

    assert await eventually_awaited(spoilt)
    run = await harness.run(session, "1")
    assert (run.outcome, run.state, run.ended.generation) == ("crashed", "reset", 2)
    assert "its own code fails with TypeError" in run.message
    assert (await harness.run(session, "1")).outcome == "succeeded"


@promise("end-unfit")
async def test_a_program_that_cannot_reach_the_interpreter_is_not_blamed(harness: Harness) -> None:
    """One descriptor is free, below all that the program holds: that it is the only one can't be seen cheaply."""
    session = await harness.session()
    code, _ = UNFIT["no descriptors"]
    assert (await harness.run(session, f"{code}\nos.close(held[0])")).state == "kept"
    run = await harness.run(session, "1")
    assert (run.outcome, run.state, run.ended.generation) == ("crashed", "reset", 2)
    assert "after the ones before it" in run.message and "descriptors" in run.message
    assert (await harness.run(session, "1")).output == 1


@promise("end-unfit")
@pytest.mark.parametrize("name", sorted(CLOSES))
async def test_a_program_may_close_its_streams_and_the_next_one_has_new_ones(harness: Harness, name: str) -> None:
    """Each later step was an EXCEPTION: the flush at its end met the closed stream."""
    session = await harness.session()
    run = await harness.run(session, f"kept = 1\n{CLOSES[name]}")
    assert (run.outcome, run.state) == ("succeeded", "kept"), run.ended
    code = "import sys\nprint('out', kept)\nprint('err', file=sys.stderr)\nsys.__stdout__.write('again\\n')\n0"
    for _ in range(2):
        run = await harness.run(session, code)
        assert (run.outcome, run.stdout, run.stderr) == ("succeeded", "out 1\nagain\n", "err\n"), run.ended


# A process that does this to every process but itself and its parents, again and again.
_ATTACKER = """\
import os, signal
first = os.getpid()
if os.fork() == 0:
    own = os.getpid()
    while True:
        for pid in map(int, filter(str.isdigit, os.listdir('/proc'))):
            if pid not in (1, first, own):
                try:
                    os.kill(pid, signal.{number})
                except OSError:
                    pass
'attacked'
"""


@promise("end-checker")
@pytest.mark.parametrize("number", ["SIGSTOP", "SIGKILL"])
async def test_a_stopped_or_killed_checker_makes_no_syntax_error(harness: Harness, number: str) -> None:
    """The next steps were: the source takes too long to parse, or the parser ended with signal 9."""
    session = await harness.session(cpu_time_s=60.0, operations=10**12)
    assert (await harness.run(session, _ATTACKER.format(number=number), operations=10**12)).output == "attacked"
    for step in range(5):
        run = await harness.run(session, f"{step} + 1")
        assert (run.outcome, run.state, run.output) == ("succeeded", "kept", step + 1), run.ended


@promise("end-checker")
async def test_a_source_that_breaks_the_parser_is_reported_so_beside_other_processes(harness: Harness) -> None:
    session = await harness.session(cpu_time_s=60.0, operations=10**12)
    code = _ATTACKER.format(number="SIGKILL").replace("'attacked'", "kept = 'kept'")
    assert (await harness.run(session, code, operations=10**12)).outcome == "succeeded"
    run = await harness.run(session, "(" * 10**6)
    assert (run.outcome, run.state) == ("exception", "kept")
    assert run.ended.error is not None and run.ended.error.type in ("SyntaxError", "MemoryError")
    assert (await harness.run(session, "kept")).output == "kept"
