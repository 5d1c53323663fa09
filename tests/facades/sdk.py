"""E2B's Python SDK: what its readme and its users do with a sandbox. Prints nothing, and fails where an answer is wrong."""

from __future__ import annotations

import time
import uuid
from typing import Any

from e2b import CommandExitException, SandboxQuery
from e2b_code_interpreter import Sandbox

DEADLINE_S = 20.0


def code(sandbox: Any) -> None:
    assert sandbox.run_code("x = 20; print('computed'); x + 1").text == "21"
    heard: list[Any] = []
    outcome = sandbox.run_code(
        "import sys\nprint('out', x)\nprint('err', file=sys.stderr)\nx * 2",
        on_stdout=lambda message: heard.append(("stdout", message.line)),
        on_stderr=lambda message: heard.append(("stderr", message.line)),
        on_result=lambda result: heard.append(("result", result.text)),
    )
    assert "".join(outcome.logs.stdout) == "out 20\n", outcome
    assert "".join(outcome.logs.stderr) == "err\n", outcome
    assert {"stdout", "stderr", "result"} == {kind for kind, _ in heard}, heard
    failed = sandbox.run_code("1 / 0")
    assert failed.error is not None and failed.error.name == "ZeroDivisionError", failed
    assert "division by zero" in failed.error.value and "ZeroDivisionError" in failed.error.traceback
    assert sandbox.run_code("import os; os.environ['COLOUR']", envs={"COLOUR": "teal"}).text == "teal"
    other = sandbox.create_code_context()
    assert sandbox.run_code("'x' in globals()", context=other).text == "False"


def commands(sandbox: Any) -> None:
    assert sandbox.commands.run("echo $GREETING", envs={"GREETING": "hello"}).stdout == "hello\n"
    try:
        sandbox.commands.run("echo gone >&2; exit 3")
    except CommandExitException as ended:
        assert (ended.exit_code, ended.stderr) == (3, "gone\n")
    else:
        raise AssertionError("a command that fails must raise")
    running = sandbox.commands.run("read line; echo got $line; sleep 60", background=True, stdin=True)
    assert running.pid in [process.pid for process in sandbox.commands.list()]
    sandbox.commands.send_stdin(running.pid, "a line\n")
    assert next(out for out, _, _ in running if out) == "got a line\n"
    assert running.kill()


def files(sandbox: Any) -> None:
    sandbox.files.make_dir("/home/user/work")
    watch = sandbox.files.watch_dir("/home/user/work")
    sandbox.files.write("/home/user/work/täxt.txt", "Grüße\n")
    assert sandbox.files.read("/home/user/work/täxt.txt") == "Grüße\n"
    sandbox.files.write("work/bytes", bytes(range(256)))
    assert bytes(sandbox.files.read("work/bytes", format="bytes")) == bytes(range(256))
    assert {entry.name for entry in sandbox.files.list("work")} == {"täxt.txt", "bytes"}
    assert sandbox.commands.run("cat work/täxt.txt").stdout == "Grüße\n"
    assert sandbox.run_code("open('work/täxt.txt').read().strip()").text == "Grüße"
    deadline, seen = time.monotonic() + DEADLINE_S, set()
    while not {"täxt.txt", "bytes"} <= seen:
        assert time.monotonic() < deadline, seen
        seen |= {event.name for event in watch.get_new_events()}
    watch.stop()
    sandbox.files.rename("work/bytes", "work/moved")
    assert sandbox.files.exists("work/moved") and not sandbox.files.exists("work/bytes")
    sandbox.files.remove("work")
    assert not sandbox.files.exists("work")


def main() -> None:
    mark = uuid.uuid4().hex
    sandbox = Sandbox.create(timeout=120, metadata={"mark": mark}, envs={"SET": "at create"})
    try:
        assert sandbox.is_running()
        assert sandbox.run_code("import os; print(os.environ['SET'])").logs.stdout == ["at create\n"]
        code(sandbox)
        commands(sandbox)
        files(sandbox)
        before = sandbox.get_info().end_at
        sandbox.set_timeout(600)
        info = sandbox.get_info()
        assert info.sandbox_id == sandbox.sandbox_id and info.metadata == {"mark": mark} and info.end_at > before
        again = Sandbox.connect(sandbox.sandbox_id)
        assert again.run_code("x").text == "20"
        listed = Sandbox.list(query=SandboxQuery(metadata={"mark": mark})).next_items()
        assert [each.sandbox_id for each in listed] == [sandbox.sandbox_id]
        assert sandbox.get_host(3000).startswith(f"3000-{sandbox.sandbox_id}.")
    finally:
        assert sandbox.kill()
    assert not sandbox.is_running()
    assert not sandbox.kill()


if __name__ == "__main__":
    main()
