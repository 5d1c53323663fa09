"""The in-memory fake refuses to begin anything that it could not confine or end."""

from __future__ import annotations

import hashlib
import threading

import pytest

from executor_server.core.errors import InvalidRequest
from executor_server.core.model import ShippedTool, ToolSource, ToolSpec
from executor_server.guest.supervisor import run as guest_run
from executor_server.sessions import Session
from tests.contract.harness import MIB, Harness
from tests.contract.marks import instead
from tests.contract.promises import BY_ID, PROMISES, Keeping
from tests.support.polling import eventually_async

# The promises that it does not keep need an operating system, a kernel with limits, or a wall.
_NOT_KEPT = [each.promise_id for each in PROMISES if each.keeping("fake") is Keeping.NOT_KEPT]
_TOOLS = [each for each in _NOT_KEPT if each.startswith("tools-sandbox")]
_LIMITS = ["create-spec", "end-memory", "limit-disk", "stream-flat"]
_OTHERS = ["end-timeout-deaf", "state-export", "state-hostile"]
_WITHOUT_A_SYSTEM = [each for each in _NOT_KEPT if each not in {*_TOOLS, *_LIMITS, *_OTHERS}]


@instead(*_WITHOUT_A_SYSTEM)
@pytest.mark.parametrize(
    "module",
    ["socket", "subprocess", "ctypes", "threading", "multiprocessing", "signal", "shutil", "pickle", "PIL", "posix"],
)
async def test_only_modules_that_compute_can_be_imported(harness: Harness, module: str) -> None:
    assert harness.backend.name == "fake"
    session = await harness.session()
    run = await harness.run(session, f"kept = 1\nimport {module}")
    assert (run.outcome, run.state, run.ended.error and run.ended.error.type) == (
        "exception",
        "kept",
        "ModuleNotFoundError",
    )
    assert (await harness.run(session, "import json, os, time\njson.dumps(kept)")).output == "1"


@instead(*_WITHOUT_A_SYSTEM)
@pytest.mark.parametrize(
    "code", ["os.fork()", "os.kill(-1, 9)", "os.abort()", "os.symlink('a', 'b')", "open('/etc/passwd')"]
)
async def test_the_stand_in_for_the_system_can_do_no_harm(harness: Harness, code: str) -> None:
    session = await harness.session()
    run = await harness.run(session, f"import os\n{code}")
    assert (run.outcome, run.state) == ("exception", "kept")
    assert run.ended.error is not None and run.ended.error.type in ("AttributeError", "PermissionError")


@instead(*_LIMITS)
async def test_programs_past_limits_that_it_lacks_are_not_ended(harness: Harness) -> None:
    session = await harness.session(memory_bytes=MIB, disk_bytes=MIB)
    code = "data = bytes(2 * 2**20)\nwith open('f', 'wb') as f:\n    n = f.write(data)\nn"
    assert (await harness.run(session, code)).output == 2 * MIB


@instead("end-timeout-deaf")
async def test_a_thread_that_ignores_the_interrupt_is_timed_out_and_left_behind(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in a function of a library, which returns when the test says so."""
    over = threading.Event()
    monkeypatch.setattr(hashlib, "pbkdf2_hmac", lambda *_: over.wait())
    monkeypatch.setattr(guest_run, "GRACE_S", 0.05)
    session = await harness.session()
    await harness.run(session, "kept = 1")
    try:
        run = await harness.run(session, "import hashlib\nhashlib.pbkdf2_hmac('sha256', b'', b'', 1)", wall_time_s=1.0)
        assert (run.outcome, run.state, run.ended.generation) == ("timeout", "reset", 2)
        assert (await harness.run(session, "'kept' in globals()")).output is False

        def left() -> list[threading.Thread]:
            return [thread for thread in threading.enumerate() if thread.name.startswith("program-")]

        assert await eventually_async(lambda: len(left()) == 1)  # the next program's own may be about to end
        (deaf_thread,) = left()
    finally:
        over.set()
    await session._sandbox.destroy()
    assert not deaf_thread.is_alive()


@instead(*_TOOLS)
async def test_a_shipped_tool_is_refused(harness: Harness) -> None:
    session: Session = await harness.session()
    tool = ToolSpec("tool", "", (), False, ShippedTool(ToolSource("def tool(): pass", "tool", None), ()))
    with pytest.raises(InvalidRequest, match="takes no shipped tools"):
        await session.register_tools([tool])
    assert BY_ID["tools-sandbox"].keeping(harness.backend.name) is Keeping.NOT_KEPT
