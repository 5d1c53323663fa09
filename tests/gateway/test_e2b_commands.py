"""What E2B's SDK expects of commands, with the real SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    Sandbox,
    TimeoutException,
)

from tests.support.gateway import Gateway
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def sandbox(e2b: Gateway) -> Iterator[Sandbox]:
    with Sandbox.create(envs={"OF_SANDBOX": "yes", "BOTH": "sandbox"}) as sandbox:
        yield sandbox


def test_a_failure_is_an_exception_with_the_output_and_the_exit_code(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo out; echo err >&2; exit 3")
    error = failed.value
    assert (error.stdout, error.stderr, error.exit_code, error.error) == ("out\n", "err\n", 3, "exit status 3")


def test_a_command_that_a_signal_ended_has_no_exit_code_of_its_own(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("kill -TERM $$")
    assert (failed.value.exit_code, failed.value.error) == (-1, "signal: terminated")


def test_text_arrives_as_it_is(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo '!@#$%^&*()_+\n🦀 ü'")
    assert (result.stdout, result.stderr, result.exit_code, result.error) == ("!@#$%^&*()_+\n🦀 ü\n", "", 0, None)


def test_bytes_that_are_no_text_are_replaced_at_the_end_of_a_piece_too(sandbox: Sandbox) -> None:
    assert sandbox.commands.run(f"printf '{'a' * 8191}\\xe2'").stdout == "a" * 8191 + "\ufffd"


def test_the_environment_of_a_command_is_over_that_of_the_sandbox_and_its_alone(sandbox: Sandbox) -> None:
    show = 'echo "$OF_SANDBOX $BOTH $OF_COMMAND"'
    assert sandbox.commands.run(show, envs={"BOTH": "command", "OF_COMMAND": "x"}).stdout == "yes command x\n"
    assert sandbox.commands.run(show).stdout == "yes sandbox \n"


@pytest.mark.parametrize(
    ("cwd", "is_in"),
    [(None, "/home/user"), ("/home/user/below", "/home/user/below"), ("below", "/home/user/below"), ("/tmp", "/tmp")],
)
def test_a_command_begins_in_its_directory(sandbox: Sandbox, cwd: str | None, is_in: str) -> None:
    sandbox.commands.run("mkdir -p /home/user/below")
    assert sandbox.commands.run("pwd", cwd=cwd).stdout == f"{is_in}\n"


def test_a_directory_that_is_not_there_is_named(sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match="/no/such"):
        sandbox.commands.run("true", cwd="/no/such")


def test_the_user_is_one_and_another_is_refused_in_words(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("id -u", user="user").stdout == sandbox.commands.run("id -u").stdout
    for other in ("root", "nobody-of-that-name"):
        with pytest.raises(AuthenticationException, match=f'"{other}" is not offered.*only user "user"'):
            sandbox.commands.run("true", user=other)


def test_output_arrives_while_the_command_runs(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("echo ready; read x; echo got $x", background=True, stdin=True)
    outputs = iter(command)
    assert next(outputs) == ("ready\n", None, None)
    sandbox.commands.send_stdin(command.pid, "it\n")
    assert next(outputs) == ("got it\n", None, None)
    assert command.wait().exit_code == 0


def test_a_command_is_killed_at_its_timeout(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 3601", timeout=0.5)
    assert eventually(lambda: not any("sleep 3601" in each.args for each in sandbox.commands.list()))


def test_a_command_outlives_its_client_and_is_found_by_its_pid(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("read x; echo got $x; exit 4", background=True, stdin=True)
    command.disconnect()
    (listed,) = [each for each in sandbox.commands.list() if each.pid == command.pid]
    assert (listed.cmd, listed.args[:2], listed.cwd) == ("/bin/bash", ["-l", "-c"], "/home/user")
    again = sandbox.commands.connect(command.pid)
    sandbox.commands.send_stdin(command.pid, "it\n")
    with pytest.raises(CommandExitException) as ended:
        again.wait()
    assert (ended.value.exit_code, ended.value.stdout) == (4, "got it\n")


def test_connecting_brings_what_comes_later_to_each_client(sandbox: Sandbox) -> None:
    first = sandbox.commands.run("echo early; read x; echo late", background=True, stdin=True)
    assert next(iter(first)) == ("early\n", None, None)
    second = sandbox.commands.connect(first.pid)
    sandbox.commands.send_stdin(first.pid, "x\n")
    assert second.wait().stdout == "late\n"
    assert first.wait().stdout == "early\nlate\n"


def test_a_killed_command_is_gone_when_kill_returns(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("sleep 3600 & wait", background=True)
    assert sandbox.commands.kill(command.pid) is True
    with pytest.raises(CommandExitException):
        sandbox.commands.run(f"kill -0 {command.pid}")
    assert command.pid not in [each.pid for each in sandbox.commands.list()]
    assert sandbox.commands.kill(command.pid) is False
    with pytest.raises(CommandExitException) as ended:
        command.wait()
    assert ended.value.exit_code == -1


def test_a_process_that_is_not_there_is_not_found(sandbox: Sandbox) -> None:
    assert sandbox.commands.kill(999_999) is False
    with pytest.raises(NotFoundException, match="process with pid 999999 not found"):
        sandbox.commands.connect(999_999)
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(999_999, "x")


def test_input_of_several_clients_is_not_lost_and_ends_when_it_is_closed(sandbox: Sandbox) -> None:
    command = sandbox.commands.run("wc -c", background=True, stdin=True)

    def send() -> None:
        for _ in range(10):
            sandbox.commands.send_stdin(command.pid, "x" * 100)

    senders = [threading.Thread(target=send) for _ in range(4)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    sandbox.commands.close_stdin(command.pid)
    assert command.wait().stdout.strip() == "4000"


def test_a_command_without_stdin_has_an_empty_one(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat", stdin=False).stdout == ""


def test_much_output_arrives_whole(sandbox: Sandbox) -> None:
    assert len(sandbox.commands.run("head -c 20000000 /dev/zero | tr '\\0' x").stdout) == 20_000_000


def test_a_sandbox_that_is_killed_ends_its_commands_with_an_error(e2b: Gateway) -> None:
    sandbox = Sandbox.create()
    command = sandbox.commands.run("sleep 3600", background=True)
    sandbox.kill()
    with pytest.raises(TimeoutException, match="sandbox was killed or reached its end of life"):
        command.wait()
    with pytest.raises(TimeoutException, match="was not found"):
        sandbox.commands.run("true")
