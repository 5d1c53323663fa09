"""Processes of a session: commands and terminals beside its executions, hostile ones among them."""

from __future__ import annotations

import asyncio
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from executor_api.limits import ARGUMENT_BYTES_MAX, ARGUMENTS_BYTES_MAX, ARGUMENTS_MAX
from executor_server.core import (
    ExecutorError,
    InvalidRequest,
    NotFound,
    PolicyViolation,
    PreconditionFailed,
    ProcessEvent,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    ProcessResult,
    ProcessStarted,
    Reason,
    ResourceExhausted,
    SignalTarget,
    TerminalSize,
)
from executor_server.sessions import Session
from executor_server.sessions.journal import ProcessLog
from tests.contract.harness import Harness
from tests.contract.marks import promise

WAIT_S = 20.0


def shell(process_id: str, script: str, **more: object) -> ProcessRequest:
    return ProcessRequest(process_id, ("/bin/sh", "-c", script), **more)  # type: ignore[arg-type]


class Read:
    """The events of a process, gathered."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.streams = {"stdout": b"", "stderr": b""}
        self.omitted_bytes = 0
        self.result: ProcessResult | None = None

    def add(self, event: ProcessEvent) -> None:
        self.numbers.append(event.number)
        match event.kind:
            case ProcessOutput(stream=stream, data=data):
                self.streams[stream] += data
            case ProcessOutputCut(omitted_bytes=omitted_bytes):
                self.omitted_bytes += omitted_bytes
            case ProcessResult() as result:
                self.result = result

    @property
    def stdout(self) -> bytes:
        return self.streams["stdout"]

    @property
    def ended(self) -> ProcessResult:
        assert self.result is not None
        return self.result


async def read(log: ProcessLog, after: int = 0) -> Read:
    """Reads a process to its end."""
    found = Read()
    async with asyncio.timeout(WAIT_S):
        async for event in log.events_with_gap(after):
            found.add(event)
    return found


async def run(session: Session, request: ProcessRequest) -> Read:
    return await read(await session.processes.start(request))


async def until(events: AsyncIterator[ProcessEvent], text: bytes) -> bytes:
    """Reads output until a text has come."""
    said = b""
    async with asyncio.timeout(WAIT_S):
        while text not in said:
            event = await anext(events)
            if isinstance(event.kind, ProcessOutput):
                said += event.kind.data
    return said


@promise("processes")
async def test_a_command_has_its_streams_its_exit_code_and_its_usage(harness: Harness) -> None:
    session = await harness.session()
    said = await run(session, shell("p", "echo out; echo err >&2; exit 3"))
    assert (said.stdout, said.streams["stderr"]) == (b"out\n", b"err\n")
    assert (said.ended.outcome, said.ended.exit_code, said.ended.signal) == (ProcessOutcome.EXITED, 3, 0)
    assert said.ended.output_bytes == 8 and said.ended.wall_time_s > 0 and said.ended.peak_memory_bytes > 0
    assert said.numbers == list(range(1, len(said.numbers) + 1))


@promise("processes")
async def test_it_has_the_directory_and_the_variables_that_it_was_given(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, "import os; os.mkdir('sub')")
    said = await run(session, shell("p", 'pwd; echo "$WORD"', cwd="sub", env={"WORD": "given"}))
    where, word = said.stdout.decode().split()
    assert where.endswith("/sub") and word == "given"


@promise("processes")
async def test_a_command_for_a_shell_has_bash_where_the_image_has_it(harness: Harness) -> None:
    session = await harness.session()
    script = (
        "ls nosuch &> log; [[ -s log ]] && echo {1..3} > out && source ./out 2>&1; echo ${BASH:+bash} >> out; cat out"
    )
    said = await run(session, shell("p", script, prefers_bash=True))
    assert said.stdout.decode().splitlines()[-2:] == ["1 2 3", "bash"]
    without = await run(session, shell("q", "echo ${BASH:+bash}", prefers_bash=True, env={"PATH": "/nowhere"}))
    assert without.stdout == b"\n"


@promise("processes")
async def test_the_workspace_belongs_to_the_user_of_the_sandbox(harness: Harness) -> None:
    """A program may change its directory's mode and times, as tar and copytree do, and git trusts it."""
    session = await harness.session()
    said = await run(session, shell("p", "stat -c %u . && id -u && chmod 1777 . && touch -d 2020-01-01 ."))
    owner, user = said.stdout.split()
    assert (owner, said.ended.exit_code) == (user, 0), said.streams["stderr"]
    shell_lines = "git init -q; echo a > a; git add -A; git commit -q -m first && git log --format=%an"
    said = await run(session, shell("q", shell_lines))
    assert said.stdout == b"sandbox\n" or b"git: not found" in said.streams["stderr"], said.streams["stderr"]
    own = "git config user.name Ada; git commit -q --allow-empty -m second && git log -1 --format=%an"
    said = await run(session, shell("r", own))
    assert said.stdout == b"Ada\n" or b"git: not found" in said.streams["stderr"], said.streams["stderr"]


@promise("processes")
async def test_a_command_that_is_none_is_refused_and_leaves_nothing(harness: Harness) -> None:
    session = await harness.session()
    await harness.run(session, _NOT_RUNNABLE)
    for command, cwd, reason, message in (
        ("no-such-command", "", Reason.COMMAND_NOT_FOUND, "not found in the PATH"),
        ("/no/such/command", "", Reason.COMMAND_NOT_FOUND, "No such file"),
        ("/etc/passwd", "", Reason.COMMAND_NOT_EXECUTABLE, "Permission denied"),
        ("/tmp", "", Reason.COMMAND_NOT_EXECUTABLE, "Is a directory"),
        ("./orphan", "", Reason.COMMAND_NOT_EXECUTABLE, "the interpreter that its first line names"),
        ("./plain", "", Reason.COMMAND_NOT_EXECUTABLE, "a first line such as"),
        ("true", "missing", Reason.CWD_NOT_FOUND, "No such file"),
        ("true", "plain", Reason.FILE_NOT_DIRECTORY, "Not a directory"),
        ("true", "closed", Reason.FILE_PERMISSION_DENIED, "Permission denied"),
        ("true", "loop", Reason.PATH_REFUSED, "symbolic links"),
    ):
        with pytest.raises(ExecutorError, match=message) as refused:
            await session.processes.start(ProcessRequest("p", (command,), cwd=cwd))
        assert refused.value.reason is reason, (command, cwd)
        assert await harness.process_ids(session) == []
    assert (await run(session, shell("p", "echo now"))).stdout == b"now\n"


_NOT_RUNNABLE = """
import os
for name, text in [("orphan", "#!/no/such/interpreter"), ("plain", "echo hello")]:
    with open(name, "w") as file:
        file.write(text)
    os.chmod(name, 0o700)
os.mkdir("closed", 0)
os.symlink("loop", "loop")
"""


@promise("processes")
async def test_merged_streams_are_one_pipe(harness: Harness) -> None:
    session = await harness.session()
    script = "for i in 1 2 3; do echo out$i; echo err$i >&2; done"
    said = await run(session, shell("p", script, merge_stderr=True))
    assert said.streams == {"stdout": b"out1\nerr1\nout2\nerr2\nout3\nerr3\n", "stderr": b""}


@promise("processes")
async def test_two_mebibytes_of_arguments_arrive(harness: Harness) -> None:
    """More than a quarter of the stack's usual limit, which is what the kernel lets them take."""
    session = await harness.session()
    program = ["python3", "-c", "import sys; print(len(sys.argv), sum(map(len, sys.argv)))"]
    parts = ["\1" * ARGUMENT_BYTES_MAX] * 15  # six bytes each in JSON
    left_bytes = ARGUMENTS_BYTES_MAX - sum(len(each) + 1 for each in [*program, *parts])
    argv = (*program, *parts, "y" * (left_bytes // 2), "z" * (left_bytes - left_bytes // 2 - 2))
    assert sum(len(each) + 1 for each in argv) == ARGUMENTS_BYTES_MAX
    said = await run(session, ProcessRequest("p", argv))
    given_bytes = sum(map(len, argv[3:])) + len("-c")
    assert said.stdout.split() == [b"%d" % (len(argv) - 2), b"%d" % given_bytes]
    assert (await run(session, ProcessRequest("q", ("/bin/true", *["a"] * (ARGUMENTS_MAX - 1))))).ended.exit_code == 0


@promise("processes")
async def test_input_is_written_once_whatever_is_repeated(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(ProcessRequest("p", ("cat",), stdin=True))
    assert await session.processes.write("p", 0, b"one ", eof=False) == 4
    assert await session.processes.write("p", 0, b"one ", eof=False) == 4
    assert await session.processes.write("p", 2, b"e two", eof=False) == 7
    with pytest.raises(InvalidRequest, match="gap"):
        await session.processes.write("p", 9, b"!", eof=False)
    assert await session.processes.write("p", 7, b"", eof=True) == 7
    assert (await read(log)).stdout == b"one two"
    with pytest.raises(PreconditionFailed):
        await session.processes.write("p", 7, b"more", eof=False)


@promise("processes")
async def test_a_process_that_does_not_read_holds_its_own_writes_up_and_nothing_else(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(ProcessRequest("p", ("sleep", "100"), stdin=True))
    piece, offset = bytes(64 * 1024), 0
    try:
        async with asyncio.timeout(1.0):
            while True:
                offset = await session.processes.write("p", offset, piece, eof=False)
    except TimeoutError:
        pass
    assert 0 < offset < 4 * 1024 * 1024
    assert (await harness.run(session, "1 + 1")).output == 2
    await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)
    assert (await read(log)).ended.signal == signal.SIGKILL


@promise("processes")
async def test_a_process_without_an_input_reads_nothing(harness: Harness) -> None:
    session = await harness.session()
    assert (await run(session, ProcessRequest("p", ("cat",)))).ended.exit_code == 0
    log = await session.processes.start(ProcessRequest("q", ("sleep", "100")))
    with pytest.raises(InvalidRequest):
        await session.processes.write("q", 0, b"x", eof=False)
    await session.processes.signal("q", signal.SIGTERM, SignalTarget.GROUP)
    assert (await read(log)).ended.signal == signal.SIGTERM


@promise("processes")
async def test_a_timeout_ends_all_that_a_process_started(harness: Harness) -> None:
    session = await harness.session()
    said = await run(session, shell("p", "trap '' TERM INT; (sleep 1000; echo late) & wait", timeout_s=0.3))
    assert (said.ended.outcome, said.ended.exit_code) == (ProcessOutcome.TIMEOUT, 128 + signal.SIGKILL)
    assert "sleep 1000" not in str((await harness.run(session, _COMMANDS)).output)


_COMMANDS = """
import os
found = []
for name in os.listdir("/proc"):
    if name.isdigit():
        try:
            found.append(open(f"/proc/{name}/cmdline", "rb").read().replace(b"\\0", b" ").decode())
        except OSError:
            pass
found
"""


@promise("processes")
async def test_signals_reach_the_group_the_process_or_the_tree(harness: Harness) -> None:
    session = await harness.session()
    script = "trap 'echo got; exit 7' USR1; echo ready; while :; do sleep 0.05; done"
    log = await session.processes.start(shell("p", script))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"ready")
    await session.processes.signal("p", signal.SIGUSR1, SignalTarget.PROCESS)
    said = await read(log)
    assert said.stdout == b"ready\ngot\n" and said.ended.exit_code == 7
    await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)  # after its end: nothing
    with pytest.raises(NotFound):
        await session.processes.signal("other", signal.SIGKILL, SignalTarget.TREE)


@promise("processes")
async def test_one_that_is_killed_ends_at_once_though_nobody_reads_its_output(harness: Harness) -> None:
    """Its output fills all buffers, for which the daemon would wait for a reader longer than this test does."""
    session = await harness.session()
    await session.processes.start(shell("p", "head -c 8600000 /dev/zero; touch full; yes"))
    await run(session, shell("q", "until [ -e full ]; do sleep 0.01; done"))
    await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)
    async with asyncio.timeout(WAIT_S):
        while await harness.runs(session, "p"):
            await run(session, ProcessRequest(f"look-{uuid.uuid4().hex}", ("true",)))


@promise("processes")
async def test_one_that_is_stopped_or_ignores_every_signal_is_ended_by_a_kill(harness: Harness) -> None:
    session = await harness.session()
    script = "import signal\nfor n in signal.valid_signals():\n  try: signal.signal(n, signal.SIG_IGN)\n  except OSError: pass\nprint('deaf', flush=True)\nwhile True: signal.pause()"
    log = await session.processes.start(ProcessRequest("p", ("python3", "-c", script)))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"deaf")
    await session.processes.signal("p", signal.SIGTERM, SignalTarget.GROUP)
    await session.processes.signal("p", signal.SIGSTOP, SignalTarget.PROCESS)
    await session.processes.signal("p", signal.SIGKILL, SignalTarget.TREE)
    assert (await read(log)).ended.signal == signal.SIGKILL


@promise("processes")
async def test_the_same_id_is_the_same_process(harness: Harness) -> None:
    session = await harness.session()
    request = shell("p", "echo once")
    first, again = await asyncio.gather(session.processes.start(request), session.processes.start(request))
    assert first is again
    assert (await read(first)).stdout == b"once\n"
    assert (await read(await session.processes.start(request))).stdout == b"once\n", "its events are kept"
    with pytest.raises(InvalidRequest) as refused:
        await session.processes.start(shell("p", "echo twice"))
    assert refused.value.reason is Reason.PROCESS_ID_REUSED


@promise("processes")
async def test_a_reader_goes_on_after_any_event(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(shell("p", "for i in 1 2 3; do echo $i; sleep 0.02; done"))
    whole = await read(log)
    assert whole.stdout == b"1\n2\n3\n"
    for after in whole.numbers:
        assert (await read(log, after)).numbers == whole.numbers[after:]


@promise("processes")
async def test_processes_run_beside_executions_and_each_other(harness: Harness) -> None:
    session = await harness.session()
    waiting = await session.processes.start(ProcessRequest("p", ("cat",), stdin=True))
    execution = await harness.begin(session, "import time; time.sleep(30)")
    assert (await run(session, shell("q", "echo beside"))).stdout == b"beside\n"
    execution.cancel()
    await session.processes.write("p", 0, b"still here", eof=True)
    assert (await read(waiting)).stdout == b"still here"


@promise("processes")
async def test_output_of_children_that_outlive_it_comes_with_the_next_execution(harness: Harness) -> None:
    session = await harness.session()
    said = await run(session, shell("p", "(while [ ! -e go ]; do sleep 0.02; done; echo late) & echo early"))
    assert said.stdout == b"early\n" and said.ended.exit_code == 0
    shown = (await harness.run(session, "open('go', 'w').close()")).stdout  # it may be printed before this one ends
    async with asyncio.timeout(WAIT_S):
        while "late" not in shown:
            shown = (await harness.run(session, "1")).stdout
    assert "background output" in shown


@promise("processes")
async def test_what_is_past_its_limit_is_counted_and_the_end_is_kept(harness: Harness) -> None:
    session = await harness.session_under("processes.max_output_bytes = 1000")
    said = await run(session, shell("p", "head -c 300000 /dev/zero | tr '\\0' a; echo the end"))
    assert said.omitted_bytes > 200_000
    assert len(said.stdout) + said.omitted_bytes == said.ended.output_bytes == 300_008
    assert said.stdout.endswith(b"the end\n")


@promise("processes")
async def test_the_policy_decides_and_bounds_them(harness: Harness) -> None:
    session = await harness.session_under("processes.allowed = false")
    with pytest.raises(PolicyViolation):
        await session.processes.start(shell("p", "true"))
    await harness.change_policy(session, "processes = { allowed = true, pty = false, max = 2 }")
    with pytest.raises(PolicyViolation):
        await session.processes.start(shell("p", "true", pty=TerminalSize(80, 24)))
    for each in ("a", "b"):
        await session.processes.start(ProcessRequest(each, ("sleep", "100")))
    with pytest.raises(ResourceExhausted) as refused:
        await session.processes.start(ProcessRequest("c", ("sleep", "100")))
    assert refused.value.reason is Reason.TOO_MANY_PROCESSES


@promise("processes")
async def test_a_process_can_neither_signal_nor_see_the_supervisor(harness: Harness) -> None:
    session = await harness.session()
    script = "kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem > /dev/null; ls /proc/1/fd; ls /proc/$$/fd"
    said = await run(session, shell("p", script))
    own = said.stdout.split()
    assert set(own) <= {b"0", b"1", b"2", b"3", b"10", b"255"}, "descriptors of the supervisor were inherited"
    assert (await harness.run(session, "1 + 1")).output == 2


@promise("processes")
async def test_the_end_of_the_session_is_the_end_of_its_processes(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(ProcessRequest("p", ("sleep", "1000")))
    async with aclosing(log.events_with_gap(0)) as events:
        await anext(events)  # it follows the process by now
        reading = asyncio.create_task(anext(events))
        await harness.end_sessions()
        ended = (await reading).kind
    assert isinstance(ended, ProcessResult)
    assert ended.outcome is ProcessOutcome.LOST and ended.lost_reason


@promise("processes-terminal")
async def test_a_terminal_has_its_size_and_takes_keys(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(
        shell("p", "stty size; read word; echo [$word]; stty size", pty=TerminalSize(100, 30))
    )
    async with aclosing(log.events_with_gap(0)) as events:
        assert await until(events, b"100") == b"30 100\r\n"
        await session.processes.resize("p", TerminalSize(40, 10))
        await session.processes.write("p", 0, b"key\n", eof=False)
        assert b"[key]" in await until(events, b"10 40")
    assert (await read(log)).ended.exit_code == 0


@promise("processes-terminal")
async def test_control_characters_reach_what_runs_in_a_terminal(harness: Harness) -> None:
    session = await harness.session()
    # A shell that has not started its child yet, or is not waiting for it, ends in ways of its own.
    waits = "trap 'exit 9' INT; echo ready; while :; do sleep 0.1; done"
    log = await session.processes.start(shell("p", waits, pty=TerminalSize(80, 24)))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"ready")
        await session.processes.write("p", 0, b"\x03", eof=False)
    assert (await read(log)).ended.exit_code == 9
    log = await session.processes.start(shell("q", "echo ready; cat; echo over", pty=TerminalSize(80, 24)))
    async with aclosing(log.events_with_gap(0)) as events:
        await until(events, b"ready")
        await session.processes.write("q", 0, b"", eof=True)
        await until(events, b"over")


@promise("processes-spared")
async def test_processes_outlive_the_interpreter_and_nothing_else_does(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(shell("p", "(sleep 1001 &) ; cat", stdin=True))
    await harness.run(session, "import subprocess; subprocess.Popen(['sleep', '1002'])")
    ended = await harness.run(session, "import os; os._exit(3)")
    assert ended.state == "reset"
    commands = str((await harness.run(session, _COMMANDS)).output)
    assert "sleep 1001" in commands and "sleep 1002" not in commands
    await session.processes.write("p", 0, b"alive", eof=True)
    assert (await read(log)).stdout == b"alive"


@promise("processes-spared")
async def test_processes_outlive_interpreters_that_are_killed_one_after_the_other(harness: Harness) -> None:
    """One that is exiting can't be stopped: in one of six cases its processes were killed with everything else."""
    session = await harness.session()
    log = await session.processes.start(ProcessRequest("p", ("cat",), stdin=True))
    for _ in range(12):
        assert (await harness.run(session, "import os; os.kill(os.getpid(), 9)")).state == "reset"
        assert await harness.runs(session, "p")
    await session.processes.write("p", 0, b"alive", eof=True)
    assert (await read(log)).stdout == b"alive"


@promise("processes-spared")
async def test_an_interpreter_that_forks_without_end_is_replaced_all_the_same(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(ProcessRequest("p", ("cat",), stdin=True))
    bomb = """
import os
if not os.fork():
    while True:
        try:
            os.fork()
        except OSError:
            pass
os._exit(3)"""
    assert (await harness.run(session, bomb)).state == "reset"
    assert (await harness.run(session, "1 + 1")).output == 2
    if await harness.runs(session, "p"):  # it is spared where that can be done in bounded time
        await session.processes.write("p", 0, b"", eof=True)
    assert (await read(log)).ended.outcome in (ProcessOutcome.EXITED, ProcessOutcome.SIGNALLED)


@promise("processes")
async def test_a_process_beside_it_costs_an_execution_no_cpu_time(harness: Harness) -> None:
    session = await harness.session()
    burn = "import time\nwhile time.process_time() < 0.8: pass\nopen('burnt', 'w').close()"
    log = await session.processes.start(ProcessRequest("p", ("python3", "-c", burn)))
    ran = await harness.run(session, "import os, time\nwhile not os.path.exists('burnt'): time.sleep(0.5)")
    assert ran.outcome == "succeeded" and ran.ended.usage.cpu_time_s < 0.6
    assert (await read(log)).ended.cpu_time_s >= 0.8


@promise("processes")
async def test_a_process_starts_with_its_first_event(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(shell("p", "echo $$"))
    async with aclosing(log.events_with_gap(0)) as events:
        first = await anext(events)
        assert isinstance(first.kind, ProcessStarted) and first.kind.pid == log.pid > 1
        assert await until(events, b"\n") == b"%d\n" % log.pid


@promise("processes")
async def test_a_process_has_the_limits_of_the_interpreter(harness: Harness) -> None:
    session = await harness.session()
    log = await session.processes.start(shell("p", "read line; cat /proc/self/limits", stdin=True))
    await session.processes.write("p", 0, b"now\n", eof=True)  # it runs, and so it is limited
    of_process = (await read(log)).stdout.decode()
    of_interpreter = (await harness.run(session, "print(open('/proc/self/limits').read())")).stdout
    for name in ("processes", "core file size", "open files", "file size", "locked memory"):
        row = next(line for line in of_interpreter.splitlines() if line.startswith(f"Max {name}"))
        assert row in of_process, name
