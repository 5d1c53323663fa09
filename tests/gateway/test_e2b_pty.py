"""What E2B's SDK expects of terminals, with the real SDK."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2b import CommandExitException, NotFoundException, PtySize, Sandbox, SandboxException, TimeoutException

from tests.support.gateway import Gateway
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def sandbox(e2b: Gateway) -> Iterator[Sandbox]:
    with Sandbox.create(envs={"OF_SANDBOX": "yes"}) as sandbox:
        yield sandbox


def test_a_terminal_is_a_login_shell_with_its_environment_directory_and_size(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=91, rows=17), envs={"ABC": "123"}, cwd="/")
    sandbox.pty.send_stdin(terminal.pid, b"echo [$OF_SANDBOX $ABC $TERM $PWD `stty size` `tty`]\nexit\n")
    output: list[bytes] = []
    assert terminal.wait(on_pty=output.append).exit_code == 0
    assert b"[yes 123 xterm-256color / 17 91 /dev/pts/" in b"".join(output)


def test_a_terminal_changes_its_size(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24))
    sandbox.pty.resize(terminal.pid, PtySize(cols=100, rows=30))
    sandbox.pty.send_stdin(terminal.pid, b"echo [`stty size`]\nexit\n")
    output: list[bytes] = []
    terminal.wait(on_pty=output.append)
    assert b"[30 100]" in b"".join(output)


def test_the_exit_code_of_a_terminal_is_that_of_its_shell(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24))
    sandbox.pty.send_stdin(terminal.pid, b"exit 3\n")
    with pytest.raises(CommandExitException) as ended:
        terminal.wait()
    assert ended.value.exit_code == 3


def test_keys_reach_the_terminal_as_keys(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24))
    sandbox.pty.send_stdin(terminal.pid, b"echo rea''dy; exec cat\n")
    output = b""
    outputs = iter(terminal)
    while b"ready" not in output:
        output += next(outputs)[2] or b""
    sandbox.pty.send_stdin(terminal.pid, b"\x03")  # Ctrl+C
    with pytest.raises(CommandExitException, match="Command exited") as ended:
        terminal.wait()
    assert ended.value.error == "signal: interrupt"


def test_a_terminal_outlives_its_client(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24), envs={"FOO": "bar"})
    sandbox.pty.send_stdin(terminal.pid, b"x=4\n")
    terminal.disconnect()
    again = sandbox.pty.connect(terminal.pid)
    assert again.pid == terminal.pid
    sandbox.pty.send_stdin(terminal.pid, b"echo [$FOO$x]\nexit\n")
    output: list[bytes] = []
    assert again.wait(on_pty=output.append).exit_code == 0
    assert b"[bar4]" in b"".join(output)


def test_a_terminal_is_killed_once(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24))
    assert sandbox.pty.kill(terminal.pid) is True
    with pytest.raises(CommandExitException):
        sandbox.commands.run(f"kill -0 {terminal.pid}")
    assert sandbox.pty.kill(terminal.pid) is False
    assert sandbox.pty.kill(999_999) is False
    terminal.disconnect()


def test_a_terminal_ends_at_its_timeout(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24), timeout=0.5)
    with pytest.raises(TimeoutException):
        terminal.wait()
    assert eventually(lambda: terminal.pid not in [each.pid for each in sandbox.commands.list()])


def test_input_of_the_wrong_kind_is_refused(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(cols=80, rows=24))
    with pytest.raises(SandboxException, match="has a terminal: send pty"):
        sandbox.commands.send_stdin(terminal.pid, "x")
    terminal.kill()
    command = sandbox.commands.run("sleep 3600", background=True)
    with pytest.raises(SandboxException, match="has no terminal: send stdin"):
        sandbox.pty.send_stdin(command.pid, b"x")
    with pytest.raises(SandboxException):
        sandbox.pty.resize(command.pid, PtySize(cols=80, rows=24))
    command.kill()
    with pytest.raises(NotFoundException):
        sandbox.pty.resize(command.pid, PtySize(cols=80, rows=24))
    for handle in (terminal, command):
        handle.disconnect()
