"""Processes of a session, as both clients see them, against a real daemon."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Generator, Iterator

import pytest

from executor_client import (
    AsyncExecutorClient,
    CallTimeoutError,
    ExecutorClientError,
    InvalidRequest,
    NotFoundError,
    OutputLimitExceeded,
    PreconditionError,
    ProcessFailed,
    ProcessOutput,
    ProcessResult,
    Session,
    TerminalSize,
)
from tests.support.daemon import Daemon
from tests.support.polling import eventually

WAIT_S = 20.0


@pytest.fixture(scope="module")
def session(daemon: Daemon) -> Iterator[Session]:
    with daemon.client() as client, client.create_session() as made:
        yield made


# -- run


def test_run_gives_the_exit_code_and_both_streams(session: Session) -> None:
    done = session.processes.run("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.signal, done.outcome, done.succeeded) == (3, 0, "exited", False)
    assert (done.stdout, done.stderr, done.omitted_bytes) == ("out\n", "err\n", 0)
    assert done.argv == ("/bin/sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.usage.output_bytes == 8 and done.usage.wall_time_s > 0
    with pytest.raises(ProcessFailed, match="exited with code 3\nerr") as caught:
        done.check()
    assert caught.value.process is done


def test_a_list_is_no_text_for_the_shell(session: Session) -> None:
    assert session.processes.run(["echo", "$HOME; ls"]).check().stdout == "$HOME; ls\n"


def test_run_uses_its_directory_and_variables(session: Session) -> None:
    session.put_file("sub/a", b"")
    done = session.processes.run("pwd; echo $GREETING", cwd="sub", env={"GREETING": "hello"})
    assert done.stdout.splitlines()[0].endswith("/sub") and done.stdout.splitlines()[1] == "hello"


def test_input_of_any_size_is_written_while_output_is_read(session: Session) -> None:
    for size_bytes in (0, 5, 100_000, 3_000_000):
        given = b"x" * size_bytes
        done = session.processes.run(["cat"], input=given, max_output_bytes=4_000_000, timeout_s=60)
        assert done.stdout_bytes == given and done.succeeded


def test_a_process_that_reads_no_input_is_no_error(session: Session) -> None:
    assert session.processes.run("exit 0", input=b"x" * 1_000_000).succeeded
    assert session.processes.run("exec <&-; sleep 0.1; echo done", input="abc").stdout == "done\n"


def test_head_and_tail_of_much_output_are_kept(session: Session) -> None:
    done = session.processes.run("seq 1 200000", max_output_bytes=1000)
    assert done.stdout.startswith("1\n2\n") and done.stdout.endswith("\n200000\n")
    note = f"\n[{done.omitted_bytes} bytes left out]\n"
    assert note in done.stdout and done.omitted_bytes == done.usage.output_bytes - 1000
    assert len(done.stdout_bytes) == 1000 + len(note)


def test_a_timeout_is_an_outcome(session: Session) -> None:
    done = session.processes.run("echo before; sleep 60", timeout_s=0.3)
    assert (done.timed_out, done.outcome, done.stdout) == (True, "timeout", "before\n")


def test_output_is_reported_as_it_arrives(session: Session) -> None:
    seen: list[tuple[str, bytes]] = []
    session.processes.run("echo a; sleep 0.1; echo b >&2", on_output=lambda stream, data: seen.append((stream, data)))
    assert seen == [("stdout", b"a\n"), ("stderr", b"b\n")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_run_that_is_left_early_kills_its_process(session: Session, error: type[BaseException]) -> None:
    def fail(stream: str, data: bytes) -> None:
        raise error

    with pytest.raises(error):
        session.processes.run("trap '' INT; echo go; sleep 600 & wait", on_output=fail)
    last = session.processes.list()[-1]
    assert eventually(lambda: session.processes.list()[-1].result is not None)
    assert session.processes.list()[-1].process_id == last.process_id


def test_interrupted_run_lets_the_process_end_by_itself(session: Session) -> None:
    def interrupt(stream: str, data: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.processes.run("trap 'exit 7' INT; echo go; while :; do sleep 0.05; done", on_output=interrupt)
    result = session.processes.list()[-1].result
    assert result is not None and result.exit_code == 7


def test_too_much_output_ends_a_command_and_its_beginning_is_kept(session: Session) -> None:
    script = "echo started >&2; sleep 600 & cat"
    with pytest.raises(OutputLimitExceeded, match="more than 1,000 bytes") as caught:
        session.processes.run(script, input=b"x" * 10_000_000, overflow="error", max_output_bytes=1000)
    assert (caught.value.stdout_bytes, caught.value.stderr_bytes) == (b"x" * 1000, b"started\n")
    assert eventually(lambda: not any(each.running for each in session.processes.list()))
    assert session.processes.run("printf 12345", overflow="error", max_output_bytes=5).stdout == "12345"


def test_a_command_that_cannot_run_is_a_result_where_the_caller_wants_it(session: Session) -> None:
    missing = session.processes.run(["no-such-program"], not_runnable="result")
    assert (missing.exit_code, missing.stdout) == (127, "")
    assert missing.stderr == "no-such-program: command not found in the PATH of the process\n"
    closed = session.processes.run(["/etc/passwd"], not_runnable="result", merge_stderr=True)
    assert (closed.exit_code, closed.stdout, closed.stderr) == (126, "/etc/passwd: Permission denied\n", "")
    with pytest.raises(FileNotFoundError):
        session.processes.run("true", cwd="missing", not_runnable="result")
    with pytest.raises(NotADirectoryError):
        session.processes.run("true", cwd="/etc/passwd", not_runnable="result")


@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_a_text_for_the_shell_may_be_longer_than_an_argument(session: Session, shell: str) -> None:
    env = {"PATH": "/nowhere"} if shell == "dash" else {}
    script = f'IFS=,\n: \'{"é" * 300_000}\'\necho "$#" "[$IFS]"; exit 5'
    done = session.processes.run(script, env=env)
    assert (done.exit_code, done.stdout, done.stderr) == (5, "0 [,]\n", "")
    with pytest.raises(InvalidRequest, match="131,071 in one; pass it in a file, or as input"):
        session.processes.run(["echo", "x" * 131_072])
    with pytest.raises(InvalidRequest, match="the limit is 2,097,152: pass the rest in a file"):
        session.processes.run("x" * 2_100_000)


def test_a_stream_yields_output_as_it_comes_and_then_the_result(session: Session) -> None:
    script = "cat; until [ -e read ]; do sleep 0.05; done; echo two >&2; exit 3"
    events = session.processes.stream(script, input="one\n", merge_stderr=True)
    assert (first := next(events)) == ProcessOutput(2, "stdout", b"one\n"), first
    session.files.write("read", b"")
    *rest, result = events
    assert [each.data for each in rest if isinstance(each, ProcessOutput)] == [b"two\n"]
    assert isinstance(result, ProcessResult) and result.exit_code == 3


def test_a_stream_that_is_left_kills_its_command(session: Session) -> None:
    for leave in (Generator.close, lambda events: None):
        events = session.processes.stream("yes", input=b"x" * 1_000_000)
        next(events)
        leave(events)
        del events
        assert eventually(lambda: not any(each.running for each in session.processes.list()))
    with pytest.raises(InvalidRequest):
        next(session.processes.stream(["no-such-program"]))


# -- start, and what a handle can do


def test_handle_gives_output_and_the_end(session: Session) -> None:
    process = session.processes.start("echo a; echo b >&2; exit 4")
    assert process.pid > 0 and process.result is None
    events = list(process)
    assert [(each.stream, each.data) for each in events if isinstance(each, ProcessOutput)] == [
        ("stdout", b"a\n"),
        ("stderr", b"b\n"),
    ]
    assert process.result is not None and process.result.exit_code == 4
    assert process.wait() is process.result
    assert list(process) == []


def test_iterating_begins_where_it_was_left(session: Session) -> None:
    process = session.processes.start("for i in 1 2 3; do echo $i; sleep 0.05; done")
    first = next(iter(process))
    assert isinstance(first, ProcessOutput) and first.data.startswith(b"1\n")
    rest = b"".join(each.data for each in process if isinstance(each, ProcessOutput))
    assert first.data + rest == b"1\n2\n3\n"


def test_bytes_are_read_as_far_as_they_have_come(session: Session) -> None:
    process = session.processes.start("echo 123; echo 456 >&2; read -r; echo 789", stdin=True, merge_stderr=True)
    read = process.read_bytes(WAIT_S, max_bytes=3)
    while len(read) < 8:
        read += process.read_bytes(0.05, max_bytes=4)
    assert read == b"123\n456\n" and (process.read_bytes(0.05), process.result) == (b"", None)
    process.write("go\n")
    assert process.read_bytes(WAIT_S) == b"789\n"
    assert process.result is not None and process.read_bytes(WAIT_S) == b""


def test_conversation_with_a_process(session: Session) -> None:
    process = session.processes.start(["cat"], stdin=True)
    events = iter(process)
    for text in ("one\n", "two\n"):
        process.write(text)
        event = next(events)
        assert isinstance(event, ProcessOutput) and event.data == text.encode()
    process.close_stdin()
    process.close_stdin()
    assert list(events) == [] and process.wait().succeeded
    with pytest.raises(PreconditionError):
        process.write("three")


def test_terminal_has_its_size_and_can_be_resized(session: Session) -> None:
    process = session.processes.start("stty size; read x; stty size", pty=TerminalSize(81, 25))
    events = iter(process)
    event = next(events)
    assert isinstance(event, ProcessOutput) and event.data == b"25 81\r\n"
    process.resize(TerminalSize(100, 30))
    process.write("\n")
    rest = b"".join(each.data for each in events if isinstance(each, ProcessOutput))
    assert b"30 100" in rest


def test_wait_ends_in_time_and_at_the_end(session: Session) -> None:
    process = session.processes.start("sleep 600")
    begun_s = time.monotonic()
    with pytest.raises(CallTimeoutError):
        process.wait(0.2)
    assert time.monotonic() - begun_s < 5
    process.terminate()
    result = process.wait(20)
    assert (result.outcome, result.signal, result.exit_code) == ("signalled", 15, 143)


def test_kill_ends_all_that_a_process_started(session: Session) -> None:
    process = session.processes.start("trap '' TERM; echo ready; sleep 600 & wait; sleep 600")
    assert next(iter(process)).data == b"ready\n"  # type: ignore[union-attr]
    process.signal(signal.SIGTERM, "process")
    process.kill()
    assert process.wait(20).signal == 9


def test_started_process_goes_on_without_its_client_and_is_found_again(daemon: Daemon, session: Session) -> None:
    made = session.processes.start("echo first; read line; echo got $line", stdin=True, process_id="server")
    assert made.process_id == "server"
    assert (
        session.processes.start("echo first; read line; echo got $line", stdin=True, process_id="server").pid
        == made.pid
    )
    with daemon.client() as other:
        found = other.get_session(session.session_id).processes.attach("server")
        found.write("it\n")
        text = b"".join(each.data for each in found if isinstance(each, ProcessOutput))
    assert text == b"first\ngot it\n"
    info = next(each for each in session.processes.list() if each.process_id == "server")
    assert info.result is not None and info.written_bytes == 3 and info.has_stdin and not info.has_pty
    with pytest.raises(NotFoundError):
        session.processes.attach("nobody")


def test_close_ends_an_iteration_in_another_thread(session: Session) -> None:
    process = session.processes.start("echo a; sleep 600")
    begun, seen = threading.Event(), []

    def read() -> None:
        for event in process:
            seen.append(event)
            begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    process.close()
    reader.join(20)
    assert not reader.is_alive() and len(seen) == 1 and process.result is None
    process.kill()


def test_values_of_variables_are_in_no_error(session: Session) -> None:
    for env in ({"A": "geheim\ud800"}, {"A": "geheim\0"}, {"A": "geheim" * 20_000}, {"A-B": "geheim"}):
        with pytest.raises(ExecutorClientError) as caught:
            session.processes.run("true", env=env)
        seen: BaseException | None = caught.value
        while seen is not None:
            assert "geheim" not in f"{seen!r}{seen}"
            seen = seen.__cause__ or seen.__context__


@pytest.mark.parametrize("command", ["", [], ["a\0b"], [""], ["x" * 200_000]])
def test_command_that_is_none_is_refused(session: Session, command: str | list[str]) -> None:
    with pytest.raises(InvalidRequest):
        session.processes.run(command)


# -- asyncio


def test_a_stream_that_a_task_leaves_kills_its_command(daemon: Daemon) -> None:
    async def main() -> None:
        async with AsyncExecutorClient(**daemon.access) as client, await client.create_session() as session:
            stream = session.processes.stream

            async def is_killed() -> bool:
                last = (await session.processes.list())[-1]
                return (await (await session.processes.attach(last.process_id)).wait(WAIT_S)).signal == signal.SIGKILL

            async for _ in stream("yes"):
                break
            assert await is_killed()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    async for _ in stream("echo go; sleep 600"):
                        pass
            assert await is_killed()

    asyncio.run(main())


def test_a_stream_that_is_left_open_at_the_end_of_its_loop_kills_its_command(daemon: Daemon, session: Session) -> None:
    async def main() -> None:
        async with AsyncExecutorClient(**daemon.access) as client:
            processes = (await client.get_session(session.session_id)).processes
            events = processes.stream("yes", input=b"x" * 1_000_000)
            await anext(events)
            await asyncio.get_running_loop().shutdown_asyncgens()  # as `asyncio.run` does

    asyncio.run(main())
    assert eventually(lambda: not any(each.running for each in session.processes.list()))
