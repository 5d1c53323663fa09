"""`executor shell`, `exec` and `attach` as a person uses them: on a real terminal, against a real daemon."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from executor_client import ExecutorClient
from executor_client.session import Session
from tests.integration.typed_terminal import on_terminal
from tests.support.daemon import Daemon, running_daemon
from tests.support.fork_server import EXECUTOR, popen, run
from tests.support.polling import eventually

TIMEOUT_S = 60.0
DETACH = b"\x1d"


@pytest.fixture
def environment(daemon: Daemon) -> dict[str, str]:
    """The environment of the daemon's user: the command finds socket and token by itself."""
    return {**os.environ, "EXECUTOR_STATE_DIR": str(daemon.state_dir)}


@pytest.fixture
def session(client: ExecutorClient) -> Iterator[Session]:
    with client.create_session() as session:
        yield session


def executor(
    environment: dict[str, str], *arguments: str, stdin: bytes = b"", timeout_s: float = TIMEOUT_S
) -> tuple[int, bytes, bytes]:
    done = run([*EXECUTOR, *arguments], env=environment, input=stdin, timeout=timeout_s)
    return done.returncode, done.stdout, done.stderr


def shell(environment: dict[str, str], *arguments: str) -> list[str]:
    """A shell whose prompt is known: `$PS1` of the sandbox is as its image has it."""
    return [*EXECUTOR, "shell", *arguments, "--shell", "sh", "--env", "PS1=ready> "]


# ---------------------------------------------------------------------------------------------------------------------
# A terminal


def test_shell_runs_commands_and_gives_its_exit_code(environment: dict[str, str], client: ExecutorClient) -> None:
    with on_terminal(shell(environment), environment) as terminal:
        before = terminal.modes()
        terminal.expect(b"ready> ")
        assert terminal.modes() != before
        terminal.type(b"stty size; tty >/dev/null && echo a-terminal\r")
        terminal.expect(b"30 100\r\n")
        terminal.expect(b"a-terminal\r\n")
        terminal.type(b"exit 7\r")
        assert terminal.end() == 7
        assert terminal.modes() == before
    assert client.list_sessions() == [], "a shell without a name leaves no session"


def test_shell_learns_a_new_size(environment: dict[str, str], session: Session) -> None:
    with on_terminal(shell(environment, session.session_id), environment) as terminal:
        terminal.expect(b"ready> ")
        terminal.type(b"echo wai''ting; until stty size | grep 40; do sleep 0.01; done\r")
        terminal.expect(b"waiting\r\n")
        terminal.resize(120, 40)
        terminal.expect(b"40 120\r\n")
        terminal.type(b"exit\r")
        assert terminal.end() == 0


def test_interrupt_reaches_the_program_and_not_the_client(environment: dict[str, str], session: Session) -> None:
    with on_terminal(shell(environment, session.session_id), environment) as terminal:
        terminal.expect(b"ready> ")
        # The program says so itself: the shell would run the next one if the signal came between two.
        terminal.type(b"sh -c 'echo star\"\"ted; exec sleep 1000'\r")
        terminal.expect(b"started\r\n")
        terminal.type(b"\x03")
        terminal.expect(b"ready> ")
        terminal.type(b"echo $?\r")
        terminal.expect(b"130\r\n")
        terminal.type(b"\x04")
        terminal.end()


def test_top_follows_sessions_until_q_and_leaves_the_terminal_as_it_was(
    environment: dict[str, str], daemon: Daemon, session: Session
) -> None:
    session.execute("print('x' * 5000)")
    with on_terminal([*EXECUTOR, "top"], environment) as terminal:
        before = terminal.modes()
        terminal.expect(b"SESSION")
        terminal.expect(session.session_id[:12].encode())
        session.execute("1 / 0")
        terminal.expect(b"exception")
        terminal.type(b"q")
        assert terminal.end() == 0
        assert terminal.modes() == before
    code, table, _ = executor(environment, "top", "--tenant", "local")
    (row,) = [line.split() for line in table.decode().splitlines() if line.startswith(session.session_id[:12])]
    assert (code, row[1:4], row[6], row[-1]) == (0, ["local", "idle", "2"], "4.9K", "exception")
    token = daemon.new_token("plain")
    assert eventually(lambda: b"--role viewer" in executor(environment, "--token", token, "top")[2])


def test_bytes_of_a_program_come_unchanged(environment: dict[str, str], session: Session) -> None:
    with on_terminal(shell(environment, session.session_id), environment) as terminal:
        terminal.expect(b"ready> ")
        terminal.type(rb"printf '\033[31mred\033[0m\377\001'; echo" + b"\r")
        terminal.expect(b"\x1b[31mred\x1b[0m\xff\x01\r\n")
        terminal.type(b"exit\r")
        terminal.end()


def test_shell_is_left_and_come_back_to(environment: dict[str, str], client: ExecutorClient) -> None:
    with on_terminal(shell(environment), environment) as terminal:
        before = terminal.modes()
        terminal.expect(b"ready> ")
        terminal.type(b"word=kept; printf '\\033[?1049h\\033[?25l'; echo se''nt\r")
        terminal.expect(b"sent\r\n")
        terminal.type(DETACH)
        assert terminal.end() == 0
        terminal.expect(b"\x1b[?25h\x1b[?1049l")
        terminal.expect(b"[detached; `executor attach ")
        name = terminal.expect(b" ").strip().decode()
        assert terminal.modes() == before
    with on_terminal([*EXECUTOR, "attach", name], environment) as terminal:
        terminal.expect(b"sent\r\n")  # as it was
        terminal.type(b"echo $word-$((1+1))\r")
        terminal.expect(b"kept-2\r\n")
        terminal.type(b"exit 3\r")
        assert terminal.end() == 3
    (info,) = client.list_sessions()
    assert executor(environment, "rm", info.session_id)[0] == 0


def test_named_shell_leaves_a_session_that_every_command_finds(
    environment: dict[str, str], client: ExecutorClient
) -> None:
    with on_terminal(shell(environment, "--name", "analysis"), environment) as terminal:
        terminal.expect(b"ready> ")
        terminal.type(b"echo made > file; exit\r")
        assert terminal.end() == 0
    assert executor(environment, "exec", "analysis", "--", "cat", "file") == (0, b"made\n", b"")
    assert b" analysis " in executor(environment, "ps")[1]
    code, out, err = executor(environment, "exec", "analysys", "--", "true")
    assert (code, out) == (2, b"") and b"did you mean analysis?" in err
    assert executor(environment, "rename", "analysis", "other") == (0, b"", b"")
    assert executor(environment, "rename", "other", "not a name")[0] == 2
    with client.create_session(name="taken"):
        code, _, err = executor(environment, "rename", "other", "taken")
        assert code == 2 and b"taken" in err and err.count(b"\n") == 1
    assert executor(environment, "rm", "other")[0] == 0
    assert client.list_sessions() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_terminal_is_restored_when_the_client_is_ended(
    environment: dict[str, str], client: ExecutorClient, number: signal.Signals
) -> None:
    with on_terminal(shell(environment), environment) as terminal:
        before = terminal.modes()
        terminal.expect(b"ready> ")
        terminal.process.send_signal(number)
        assert terminal.end() in (129, 130)
        assert terminal.modes() == before
    assert client.list_sessions() == []


def test_closed_terminal_hangs_up_on_the_shell(environment: dict[str, str], session: Session) -> None:
    """Shells whose windows were closed must not fill the session."""
    with on_terminal(shell(environment, session.session_id), environment) as terminal:
        terminal.expect(b"ready> ")
        terminal.type(b"echo star''ted; sleep 1000\r")
        terminal.expect(b"started\r\n")
        for _ in range(3):  # the kernel's, the outer shell's, the window's
            terminal.process.send_signal(signal.SIGHUP)
        assert terminal.end() == 129
    assert eventually(lambda: not any(info.running for info in session.processes.list()))


def test_shell_without_a_terminal_says_what_to_use(environment: dict[str, str], client: ExecutorClient) -> None:
    code, out, err = executor(environment, "shell")
    assert (code, out) == (2, b"") and b"executor exec SESSION -- COMMAND" in err and err.count(b"\n") == 1
    assert client.list_sessions() == []


def test_daemon_that_is_killed_under_a_shell_loses_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Output from the time without a daemon comes once the next one runs, each byte once."""
    directory = tmp_path_factory.mktemp("d")
    with running_daemon(directory) as first:
        environment = {**os.environ, "EXECUTOR_STATE_DIR": str(first.state_dir)}
        with first.client() as client:
            made = client.create_session(detached=True)
        with on_terminal(shell(environment, made.session_id), environment) as terminal:
            terminal.expect(b"ready> ")
            terminal.type(b"while ! test -e go; do sleep 0.05; done; i=0; while [ $i -lt 500 ]; do i=$((i+1)); ")
            terminal.type(b"echo line-$i.; done; echo all-$i.\r")
            terminal.expect(b"all-$i.\r\n")
            first.kill()
            terminal.expect(b"[the daemon does not answer")
            with running_daemon(directory) as second, second.client() as client:
                client.get_session(made.session_id).put_file("go", b"")
                printed = terminal.expect(b"all-500.\r\n")
                assert [printed.count(b"line-%d." % i) for i in range(1, 501)] == [1] * 500
                terminal.type(b"exit 5\r")
                assert terminal.end() == 5
                client.get_session(made.session_id).close()


def test_exec_with_a_terminal_is_a_shell_for_one_command(environment: dict[str, str], session: Session) -> None:
    command = [*EXECUTOR, "exec", "-t", session.session_id, "--", "sh", "-c", "read line; echo got-$line; exit 4"]
    with on_terminal(command, environment) as terminal:
        terminal.type(b"word\r")
        terminal.expect(b"got-word\r\n")
        assert terminal.end() == 4


# ---------------------------------------------------------------------------------------------------------------------
# Pipes


def test_exec_gives_output_and_exit_code_of_the_command(environment: dict[str, str], session: Session) -> None:
    command = ("sh", "-c", r"printf 'out\377\033[1m'; echo err >&2; exit 6")
    assert executor(environment, "exec", session.session_id, "--", *command) == (6, b"out\xff\x1b[1m", b"err\n")
    assert executor(environment, "exec", session.session_id, "--", "sh", "-c", "kill -9 $$")[0] == 137
    code, out, err = executor(environment, "exec", session.session_id, "--", "no-such-command")
    assert (code, out) == (127, b"") and b"no-such-command" in err
    code, out, err = executor(environment, "exec", session.session_id, "--", "/etc/passwd")
    assert (code, out) == (126, b"") and b"/etc/passwd: Permission denied" in err
    assert executor(environment, "exec", "--timeout", "0.2", session.session_id, "--", "sleep", "1000") == (
        124,
        b"",
        b"executor: timeout\n",
    )


def test_exec_passes_a_pipe_on(environment: dict[str, str], session: Session) -> None:
    data = os.urandom(3_000_000)
    assert executor(environment, "exec", session.session_id, "--", "cat", stdin=data) == (0, data, b"")
    assert executor(environment, "exec", session.session_id, "--", "head", "-c3", stdin=data) == (0, data[:3], b"")


def test_exec_has_directory_and_variables(environment: dict[str, str], session: Session) -> None:
    arguments = ("--cwd", "/tmp", "--env", "WORD=a=b", session.session_id, "--", "sh", "-c", "pwd; echo $WORD")
    assert executor(environment, "exec", *arguments) == (0, b"/tmp\na=b\n", b"")


def test_interrupt_of_exec_interrupts_the_command(environment: dict[str, str], session: Session) -> None:
    """No shell: dash loses a SIGINT between its fork and the child's exec, which another Ctrl-C makes up for."""
    session.put_file("text", b"started\n")
    command = [*EXECUTOR, "exec", "-n", session.session_id, "--", "tail", "-f", "text"]
    with popen(command, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"started\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


def test_command_ends_when_its_reader_goes(environment: dict[str, str], session: Session) -> None:
    """The case of `executor exec … | head -1`."""
    command = [*EXECUTOR, "exec", "-n", session.session_id, "--", "sh", "-c", "while :; do echo y; done"]
    with popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(TIMEOUT_S) == 1
        assert process.stderr.read() == b""
    assert eventually(lambda: not any(info.running for info in session.processes.list()))


def test_exec_without_a_terminal_cannot_drive_one(environment: dict[str, str], session: Session) -> None:
    command = [*EXECUTOR, "exec", session.session_id, "--", "printf", r"\033]0;title\007\r\nline\n\302\233x"]
    with on_terminal(command, environment) as terminal:
        terminal.expect(b"line\r\n\\x9bx")
        assert terminal.end() == 0
        assert b"\x1b" not in terminal.seen and b"\a" not in terminal.seen
        assert b"\\x1b]0;title\\x07\r\nline" in terminal.seen


def test_detached_command_is_listed_and_attached_to(environment: dict[str, str], session: Session) -> None:
    command = ("sh", "-c", "echo first; while ! test -e go; do sleep 0.05; done; echo last; exit 9")
    code, out, _ = executor(environment, "exec", "-d", session.session_id, "--", *command)
    process_id = out.decode().strip()
    assert code == 0
    code, out, _ = executor(environment, "ps", session.session_id)
    header, row = out.decode().splitlines()
    assert header.split()[:3] == ["PROCESS", "PID", "STATE"] and row.split()[0] == process_id[:12]
    assert "running" in row and "  sh -c 'echo first; while" in row
    assert executor(environment, "ps", "-q", session.session_id)[1].decode().split() == [process_id]
    session.put_file("go", b"")
    assert executor(environment, "attach", session.session_id, process_id[:8]) == (9, b"first\nlast\n", b"")
