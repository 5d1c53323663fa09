"""Every end of an execution has its own outcome, comes in time, and the session goes on."""

from __future__ import annotations

import asyncio
import tempfile

import pytest

from executor_server.core.errors import PreconditionFailed
from executor_server.guest.wire.exit_codes import END_REASONS, ORPHANED
from tests.contract.harness import MIB, Harness, follow
from tests.contract.marks import promise
from tests.support.polling import eventually_async, eventually_awaited

# Seconds for a daemon to be sure that a sandbox does not exist, when it has to ask a cloud.
LOST_WITHIN_S = 30.0
# name: (code, limits of the execution, outcome, state)
ENDS: dict[str, tuple[str, dict[str, float], str, str]] = {
    "busy loop": ("while True:\n    pass", {"wall_time_s": 0.2, "operations": 10**12}, "timeout", "kept"),
    "sleep": ("import time\ntime.sleep(1e6)", {"wall_time_s": 0.2}, "timeout", "kept"),
    "interrupt swallowed": (
        "import time\nwhile True:\n    try:\n        time.sleep(1)\n    except:\n        pass",
        {"wall_time_s": 0.2},
        "timeout",
        "kept",
    ),
    "loop in C": ("sum(iter(int, 1))", {"wall_time_s": 0.8}, "timeout", "reset"),
    "signals blocked": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\ntime.sleep(1e6)",
        {"wall_time_s": 0.8},
        "timeout",
        "reset",
    ),
    "stopped itself": (
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        {"wall_time_s": 0.8},
        "timeout",
        "reset",
    ),
    "cpu": (
        "import os\nfor _ in range(2):\n    if os.fork() == 0:\n        while True:\n            pass\nwhile True:\n    pass",
        {"cpu_time_s": 0.3, "operations": 10**12},
        "cpu_limit",
        "kept",
    ),
    "cpu of one": ("while True:\n    pass", {"cpu_time_s": 0.3, "operations": 10**12}, "cpu_limit", "kept"),
    "operations": (
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        {"operations": 10**5},
        "operation_limit",
        "kept",
    ),
    "flood": ("print('x' * 10**8)", {}, "output_limit", "kept"),
    "memory": ("x = []\nwhile True:\n    x.append(bytearray(10**6))", {}, "out_of_memory", "kept"),
    "shared memory": (
        "import mmap\nshared = mmap.mmap(-1, 2**30)\nwhile True:\n    shared.write(bytes(10**6))",
        {},
        "out_of_memory",
        "reset",
    ),
    "library without memory": (
        "import os\nos.write(2, b'OpenBLAS error: Memory allocation still failed after 10 retries, giving up.\\n')\n"
        "os._exit(1)",
        {},
        "out_of_memory",
        "reset",
    ),
    "library without memory for threads": (
        "import os, signal\nos.write(2, b'OpenBLAS blas_thread_init: pthread_create failed for thread 1 of 2\\n')\n"
        "os.kill(os.getpid(), signal.SIGINT)",
        {},
        "out_of_memory",
        "kept",
    ),
    "exit": ("raise SystemExit(3)", {}, "exited", "kept"),
    "hard exit": ("import os\nos._exit(3)", {}, "exited", "reset"),
    "segfault": ("import ctypes\nctypes.string_at(0)", {}, "crashed", "reset"),
    "killed itself": ("import os\nos.kill(os.getpid(), 9)", {}, "crashed", "reset"),
    "recursion": ("def f():\n    f()\nf()", {}, "exception", "kept"),
    "exception without a class": (
        "class E(Exception):\n    __class__ = property(lambda self: 1 / 0)\nraise E('mine')",
        {},
        "exception",
        "kept",
    ),
    "syntax": ("def", {}, "exception", "kept"),
    "import": ("import socket", {}, "import_denied", "kept"),
}


PROVES = {
    "busy loop": "end-timeout",
    "sleep": "end-timeout",
    "interrupt swallowed": "end-timeout",
    "loop in C": "end-timeout-deaf",
    "signals blocked": "end-timeout-deaf",
    "stopped itself": "end-timeout-deaf",
    "cpu": "end-cpu-children",
    "cpu of one": "end-cpu",
    "operations": "end-operations",
    "flood": "end-output",
    "memory": "end-memory",
    "shared memory": "end-memory",
    "library without memory": "end-memory",
    "library without memory for threads": "end-memory",
    "exit": "end-exit",
    "hard exit": "end-exit",
    "segfault": "end-crash",
    "killed itself": "end-crash",
    "recursion": "end-exception",
    "exception without a class": "end-exception",
    "syntax": "end-exception",
    "import": "end-import",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=promise(PROVES[name])) for name in ENDS])
async def test_an_end_has_its_own_outcome_and_the_session_goes_on(harness: Harness, name: str) -> None:
    code, limits, outcome, state = ENDS[name]
    imports = ("os", "time", "signal", "ctypes") if name == "import" else ("*",)
    session = await harness.session(memory_bytes=256 * MIB, imports=imports, operations=10**12)
    assert (await harness.run(session, "kept = 'kept'")).outcome == "succeeded"
    run = await harness.run(session, f"print('said')\n{code}" if name not in ("syntax", "import") else code, **limits)
    assert (run.outcome, run.state) == (outcome, state), run.ended
    assert run.ended.error is not None and run.ended.error.message
    if name not in ("syntax", "import"):
        assert run.stdout.startswith("said\n")
    assert run.ended.generation == (1 if state == "kept" else 2)
    after = await harness.run(session, "globals().get('kept')")
    assert after.output == ("kept" if state == "kept" else None)
    assert after.state == "kept"


HIDING = {
    "a code without a class": (
        "class Lazy:\n    __class__ = property(lambda self: 1 / 0)\nraise SystemExit(Lazy())",
        "exited",
    ),
    "a code of its own class": (
        "class Own(int):\n    def __and__(self, other):\n        return 'x'\nraise SystemExit(Own(3))",
        "exited",
    ),
    "no code": ("class Exit(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise Exit", "exception"),
    "no traceback": ("class E(Exception):\n    __traceback__ = property(lambda self: 1 / 0)\nraise E", "exception"),
    "a cause that exits": (
        "class Cause(Exception):\n    @property\n    def __class__(self):\n        raise SystemExit\n"
        "raise ValueError('mine') from Cause()",
        "exception",
    ),
    "a message of its own class": (
        "class Text(str):\n    def __len__(self):\n        return 1 / 0\n"
        "class E(Exception):\n    def __str__(self):\n        return Text('mine')\nraise E",
        "exception",
    ),
    "no name": (
        "class Meta(type):\n    __name__ = property(lambda self: 1 / 0)\n"
        "class E(Exception, metaclass=Meta):\n    pass\nraise E",
        "exception",
    ),
}


@promise("end-exception")
@pytest.mark.parametrize(("code", "outcome"), HIDING.values(), ids=HIDING)
async def test_an_exception_whose_own_code_fails_costs_no_variables(harness: Harness, code: str, outcome: str) -> None:
    """The interpreter ended when it described the exception."""
    session = await harness.session()
    await harness.run(session, "kept = 'kept'")
    run = await harness.run(session, code)
    assert (run.outcome, run.state) == (outcome, "kept"), run.ended
    assert run.ended.error is not None
    assert (await harness.run(session, "kept")).output == "kept"


@promise("end-fork-bomb")
async def test_a_fork_bomb_is_bounded_and_the_session_goes_on(harness: Harness) -> None:
    session = await harness.session(processes=32, operations=10**12)
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    run = await harness.run(session, bomb, wall_time_s=0.5, operations=10**12)
    assert run.outcome in ("timeout", "cpu_limit")
    assert (await harness.run(session, "1 + 1")).output == 2


@promise("end-hostile-source")
@pytest.mark.parametrize(
    ("what", "source"),
    {
        "deep parentheses": "(" * 100_000,
        "nul": "x = 1\0",
        "lone surrogate in a literal's escape": "print('\\ud800')",
        "many statements": "x = 1\n" * 50_000,
    }.items(),
    ids=lambda value: value if len(value) < 40 else "",
)
async def test_a_hostile_source_costs_one_execution(harness: Harness, what: str, source: str) -> None:
    session = await harness.session()
    await harness.run(session, "kept = 1")
    run = await harness.run(session, source)
    assert run.outcome in ("exception", "succeeded"), (what, run.ended)
    assert (await harness.run(session, "kept")).output == 1


@promise("interrupt")
async def test_cancelling_interrupts_and_says_so(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "print('runs')\nimport time\ntime.sleep(1e6)")
    events = execution.events()
    assert "runs" in str(await anext(events))
    execution.cancel()
    run = await follow(execution)
    assert (run.outcome, run.state) == ("cancelled", "kept")


@promise("interrupt-waiting")
async def test_a_waiting_execution_can_be_cancelled(harness: Harness) -> None:
    session = await harness.session()
    first = await harness.begin(session, "import time\ntime.sleep(0.3)")
    second = await harness.begin(session, "x = 1")
    second.cancel()
    assert (await follow(second)).outcome == "cancelled"
    assert (await follow(first)).outcome == "succeeded"
    assert (await harness.run(session, "'x' in globals()")).output is False


@promise("limit-disk")
async def test_the_disk_is_bounded(harness: Harness) -> None:
    session = await harness.session(disk_bytes=4 * MIB)
    for path in ("/workspace/big", "/tmp/big"):
        run = await harness.run(session, f"open({path!r}, 'wb').write(bytes(8 * 2**20))")
        assert run.outcome == "exception" and "OSError" in str(run.ended.error)


_MANY_FILES = """
import errno, os
def fill(place, make):
    made = 0
    try:
        while made < 1000:
            make(f"{place}/f{made}")
            made += 1
    except OSError as error:
        return made, errno.errorcode[error.errno]
    return made, None
"""


@promise("limit-files")
async def test_the_number_of_files_is_bounded(harness: Harness) -> None:
    """Empty files have no size, and were bounded by none: 300,000 of them took the kernel's memory."""
    session = await harness.session(max_files=200)
    for place in ("/workspace", "/tmp"):
        for make in ("lambda path: open(path, 'w').close()", "os.mkdir", "lambda path: os.symlink('x', path)"):
            clean = f"import os\nos.system('rm -rf {place}/f[0-9]*')"
            run = await harness.run(session, f"{_MANY_FILES}\n{clean}\nfill({place!r}, {make})")
            made, why = run.output
            assert (why, 150 < made <= 200) == ("ENOSPC", True), (place, make, run.output)
    assert (await harness.run(session, "40 + 2")).output == 42


@promise("end-kill-all")
async def test_code_that_kills_everything_else_hurts_itself_only(harness: Harness) -> None:
    session = await harness.session()
    assert (await harness.run(session, "import os\nos.kill(-1, 9)\nkept = 1")).outcome == "succeeded"
    assert (await harness.run(session, "kept")).output == 1


@promise("end-crash")
async def test_a_killed_interpreter_is_a_crash(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "import time\nprint('runs')\ntime.sleep(1e6)")
    await anext(execution.events())
    await harness.probe.kill_interpreter(session)
    run = await follow(execution)
    assert (run.outcome, run.state, run.ended.generation) == ("crashed", "reset", 2)
    assert "SIGKILL" in run.message
    assert (await harness.run(session, "1 + 1")).output == 2


@promise("end-lost", "end-lost-cause")
async def test_a_sandbox_that_is_ended_from_outside_is_lost_with_its_cause(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "kept = 1")
    execution = await harness.begin(session, "import time\nprint('runs')\ntime.sleep(1e6)")
    await anext(execution.events())
    await harness.kill_sandbox(session)
    run = await follow(execution)
    assert (run.outcome, run.state, run.stdout) == ("lost", "lost", "runs\n")
    assert session.state == "lost"
    reason = session.lost_reason or ""
    assert reason and not any(each in reason for each in (tempfile.gettempdir(), "/run/", "\n")), reason
    with pytest.raises(PreconditionFailed):
        await harness.begin(session, "kept")
    assert (await follow(execution)).outcome == "lost", "it is run once, and the same to whoever asks again"


@promise("end-lost-cause")
async def test_an_idle_session_whose_sandbox_is_ended_is_lost(harness: Harness) -> None:
    session = await harness.session()
    await harness.kill_sandbox(session)
    assert await eventually_async(lambda: session.state == "lost", timeout_s=LOST_WITHIN_S)
    with pytest.raises(PreconditionFailed):
        await session.set_variables([])


@promise("end-lost", "end-lost-supervisor")
async def test_a_killed_supervisor_loses_the_session_and_says_so(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "import time\nprint('runs')\ntime.sleep(1e6)")
    await anext(execution.events())
    await harness.probe.kill_supervisor(session)
    run = await follow(execution)
    assert (run.outcome, run.state) == ("lost", "lost")
    assert session.state == "lost"
    with pytest.raises(PreconditionFailed, match="sandbox is gone"):
        await harness.begin(session, "1")


@promise("stream-broken")
async def test_a_broken_connection_loses_nothing(harness: Harness) -> None:
    session = await harness.session()
    execution = await harness.begin(
        session, "import time\nfor i in range(20):\n    print(i, flush=True)\n    time.sleep(0.02)\n'end'"
    )
    await anext(execution.events())
    transport = session._channel._transport
    assert transport is not None
    transport.abort()
    run = await follow(execution)
    assert run.stdout.split() == [str(i) for i in range(20)]
    assert run.output == "end"
    assert session.state == "idle"


@promise("limit-orphan")
async def test_an_orphaned_sandbox_ends_itself(harness: Harness) -> None:
    session = await harness.session(orphan_time_s=1.0)
    has_ended = harness.probe.watch(session)
    session._channel.close()
    assert await eventually_async(has_ended)
    if harness.backend.name in ("local", "docker"):  # the others know nothing of a process
        assert await session._sandbox.cause_of_death() == END_REASONS[ORPHANED]


@promise("limit-idle")
async def test_unused_sessions_end(harness: Harness) -> None:
    session = await harness.session(idle_time_s=1.0)
    has_ended = harness.probe.watch(session)
    busy = await harness.begin(session, "import time\ntime.sleep(1.5)\n1")
    assert (await follow(busy)).output == 1  # a session in use is not idle
    assert await eventually_awaited(lambda: _has_none(harness))
    assert await eventually_async(has_ended)


async def _has_none(harness: Harness) -> bool:
    return await harness.session_ids() == []


@promise("limit-age")
async def test_old_sessions_end_even_in_use(harness: Harness) -> None:
    session = await harness.session(session_time_s=0.3)
    execution = await harness.begin(session, "import time\ntime.sleep(1e6)")
    run = await follow(execution)
    assert run.outcome == "cancelled" and "expired" in run.message


@promise("stream-flat")
async def test_the_daemons_memory_stays_flat_under_output(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "print('x' * 10**6)")
    before = [(process, process.memory_info().rss) for process in harness.daemons()]
    for _ in range(3):
        await harness.run(session, "print('x' * 10**8)")
    assert all(process.memory_info().rss - rss < 64 * MIB for process, rss in before)


@promise("create-apart")
async def test_sessions_are_apart(harness: Harness) -> None:
    one, other = await asyncio.gather(harness.session(), harness.session())
    await harness.run(one, "secret = 1\nopen('/tmp/f', 'w').write('secret')\nopen('/dev/shm/f', 'w').write('secret')")
    seen = await harness.run(
        other, "import os\n('secret' in globals(), os.path.exists('/tmp/f'), os.path.exists('/dev/shm/f'))"
    )
    assert seen.output == (False, False, False)


WAITS_AGAIN = {
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor, as_completed
def work(number):
    begun.append(number)
    time.sleep(30)
with ThreadPoolExecutor(2) as pool:
    for done in as_completed([pool.submit(work, number) for number in range(9)]):
        done.result()
""",
    "a pool of processes": """
from concurrent.futures import ProcessPoolExecutor
def work(number):
    time.sleep(30)
with ProcessPoolExecutor(2) as pool:
    list(pool.map(work, range(9)))
""",
    "threads of asyncio": """
import asyncio
async def main():
    await asyncio.gather(*[asyncio.to_thread(time.sleep, 30) for number in range(2)])
asyncio.run(main())
""",
    "finally": """
try:
    try:
        time.sleep(30)
    finally:
        time.sleep(30)
finally:
    time.sleep(30)
""",
    "a command in C": "import os\nos.system('sleep 30')",
    "a command": "import subprocess\nwith subprocess.Popen(['sleep', '30']) as process:\n    process.wait()",
}


@promise("interrupt-again")
@pytest.mark.parametrize("code", WAITS_AGAIN.values(), ids=WAITS_AGAIN)
async def test_a_program_that_waits_again_is_interrupted_again_and_keeps_its_variables(
    harness: Harness, code: str
) -> None:
    session = await harness.session()
    run = await harness.run(session, f"import time\nbegun = []\n{code}", wall_time_s=0.5)
    assert (run.outcome, run.state) == ("timeout", "kept")
    after = await harness.run(session, "import gc; gc.collect(); len(begun)")
    assert after.output <= 2, "what a pool has queued is cancelled"


THREADS = {
    "of a pool": "with ThreadPoolExecutor(2) as pool:\n    list(pool.map(spin, range(2)))",
    "of a pool of an earlier step": "list(kept.map(spin, range(2)))",
    "of its own": "thread = threading.Thread(target=spin, args=[0])\nthread.start()\nthread.join()",
}


@promise("interrupt-again")
@pytest.mark.parametrize("code", THREADS.values(), ids=THREADS)
async def test_threads_of_a_stopped_program_spend_nothing_of_a_later_one(harness: Harness, code: str) -> None:
    session = await harness.session(operations=10**12)
    made = """
from concurrent.futures import ThreadPoolExecutor
import threading, time
kept = ThreadPoolExecutor(2)
kept.submit(int).result()
ended = threading.Event()
def spin(_):
    while True:
        pass
def serve():
    ended.wait()
    while not ended.is_set():
        pass
background = threading.Thread(target=serve)
background.start()
"""
    assert (await harness.run(session, made)).outcome == "succeeded"
    assert (await harness.run(session, code, wall_time_s=0.5)).outcome == "timeout"
    idle = await harness.run(session, "time.sleep(0.5)", operations=1000)
    assert (idle.outcome, idle.ended.usage.operations, idle.stderr) == ("succeeded", 0, ""), idle.message
    still = await harness.run(session, "alive = background.is_alive()\nended.set()\n(alive, kept.submit(int).result())")
    assert still.output == (True, 0), "what earlier steps began goes on"


@promise("interrupt-again")
async def test_tasks_of_a_stopped_program_do_not_go_on_in_the_next_one(harness: Harness) -> None:
    session = await harness.session()
    code = """
import asyncio
async def work():
    while True:
        await asyncio.sleep(0.01)
        print("goes on")
await asyncio.gather(work(), work())
"""
    assert (await harness.run(session, code, wall_time_s=0.3)).outcome == "timeout"
    after = await harness.run(session, "await asyncio.sleep(0.1)")
    assert (after.outcome, after.stdout) == ("succeeded", "")


@promise("interrupt-again")
async def test_a_time_limit_during_the_import_for_a_first_await_leaves_asyncio_whole(harness: Harness) -> None:
    """A package whose import is cut short keeps submodules that a second import does not bind: a NameError for good."""
    session = await harness.session()
    code = """
import sys, time
class Slow:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "asyncio.streams":
            time.sleep(0.5)
sys.meta_path.insert(0, Slow)
async def done():
    return 1
"""
    assert (await harness.run(session, code)).outcome == "succeeded"
    assert (await harness.run(session, "await done()\ntime.sleep(30)", wall_time_s=0.3)).outcome == "timeout"
    assert (await harness.run(session, "await done()")).output == 1


@promise("interrupt-again")
async def test_a_handler_of_signals_that_a_program_left_is_no_later_one_s(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)")
    run = await harness.run(session, "time.sleep(30)", wall_time_s=0.3)
    assert (run.outcome, run.state) == ("timeout", "kept")


@promise("interrupt-again")
@pytest.mark.parametrize(
    ("timer", "handler"),
    [
        ("alarm(1)", "late"),
        ("setitimer(signal.ITIMER_REAL, 0.2)", "signal.SIG_DFL"),
        ("setitimer(signal.ITIMER_PROF, 0.1)", "late"),
    ],
)
async def test_a_timer_that_a_program_left_disturbs_no_later_one(harness: Harness, timer: str, handler: str) -> None:
    session = await harness.session()
    code = f"""
import signal, time
def late(*_):
    raise TimeoutError("too late")
signal.signal(signal.SIGPROF if "PROF" in {timer!r} else signal.SIGALRM, {handler})
signal.{timer}
"""
    assert (await harness.run(session, code)).outcome == "succeeded"
    busy = "end = time.monotonic() + 1.2\nwhile time.monotonic() < end:\n    sum(range(10_000))\n'done'"
    after = await harness.run(session, busy)
    assert (after.outcome, after.output, after.state) == ("succeeded", "done", "kept"), after.message
