"""The real SDK of E2B, unpatched, works against the double of its cloud, so the double is what the SDK expects."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    NotFoundException,
    PtySize,
    RateLimitException,
    Sandbox,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
)
from e2b.connection_config import ApiParams
from e2b.exceptions import TimeoutException
from e2b_code_interpreter import AsyncSandbox as AsyncInterpreter
from e2b_code_interpreter import Sandbox as Interpreter

from tests.support.e2b import WHY_NOT, Double, ThreadedDouble
from tests.support.polling import eventually, eventually_async, eventually_awaited

pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

LONG_S = 300
HELD_S = 0.3


@pytest.fixture
async def double() -> AsyncIterator[Double]:
    async with Double() as double:
        yield double


@pytest.fixture
def threaded() -> Iterator[ThreadedDouble]:
    with ThreadedDouble() as double:
        yield double


@pytest.fixture
async def sandbox(double: Double) -> AsyncSandbox:
    return await AsyncSandbox.create(timeout=LONG_S, **settings(double))


def settings(double: Double | ThreadedDouble) -> dict[str, Any]:
    given = {"api_key": double.api_key, "api_url": double.url, "sandbox_url": double.url, "retries": 0}
    return {name: value for name, value in given.items() if name in ApiParams.__annotations__}  # not all have `retries`


async def run(sandbox: AsyncSandbox, command: str, **how: Any) -> str:
    return str((await sandbox.commands.run(command, **how)).stdout)


# ---------------------------------------------------------------------------------------------------------------------
# The account


async def test_a_sandbox_lives_until_it_is_killed(double: Double, sandbox: AsyncSandbox) -> None:
    assert await sandbox.is_running()
    assert await sandbox.kill()
    assert not await sandbox.kill()
    assert not await sandbox.is_running()
    assert double.sandboxes == {}


async def test_no_request_is_answered_without_the_key(double: Double) -> None:
    with pytest.raises(AuthenticationException):
        await AsyncSandbox.create(**{**settings(double), "api_key": "e2b_" + "1" * 40})
    assert double.sandboxes == {}


async def test_a_missing_template_is_not_found(double: Double) -> None:
    with pytest.raises(Exception, match=r"404.*'nothing' not found"):
        await AsyncSandbox.create("nothing", **settings(double))


async def test_a_template_may_lack_python(double: Double) -> None:
    sandbox = await AsyncSandbox.create("no-python", **settings(double))
    with pytest.raises(CommandExitException) as failed:
        await sandbox.commands.run("python3 -V")
    assert failed.value.exit_code == 127
    assert await run(sandbox, "echo still a shell") == "still a shell\n"


async def test_more_sandboxes_than_the_account_has_are_refused(double: Double) -> None:
    double.max_sandboxes = 2
    made = await asyncio.gather(*(AsyncSandbox.create(**settings(double)) for _ in range(5)), return_exceptions=True)
    assert sorted(type(one).__name__ for one in made) == ["AsyncSandbox"] * 2 + ["RateLimitException"] * 3
    assert len(double.sandboxes) == 2


async def test_an_idempotency_key_makes_one_sandbox(double: Double) -> None:
    made = await asyncio.gather(*(AsyncSandbox.create(idempotency_key="k-1", **settings(double)) for _ in range(4)))
    assert len({one.sandbox_id for one in made}) == 1
    assert double.created == 1


async def test_sandboxes_are_listed_by_metadata_and_state_in_pages(double: Double) -> None:
    for number in range(5):
        metadata = {"executor-daemon": "a b&c=é/", "n": str(number)}
        await AsyncSandbox.create(metadata=metadata, **settings(double))
    other = await AsyncSandbox.create(metadata={"executor-daemon": "other"}, **settings(double))
    query = SandboxQuery(metadata={"executor-daemon": "a b&c=é/"}, state=[SandboxState.RUNNING])
    pages = AsyncSandbox.list(query=query, limit=2, api_key=double.api_key, api_url=double.url)
    found: list[list[str]] = []
    while pages.has_next:
        found.append([one.metadata["n"] for one in await pages.next_items()])
    assert found == [["4", "3"], ["2", "1"], ["0"]]
    await other.pause()
    paused = AsyncSandbox.list(
        query=SandboxQuery(state=[SandboxState.PAUSED]), api_key=double.api_key, api_url=double.url
    )
    assert [one.sandbox_id for one in await paused.next_items()] == [other.sandbox_id]


async def test_a_sandbox_ends_at_the_end_of_its_lifetime(double: Double, sandbox: AsyncSandbox) -> None:
    await sandbox.set_timeout(60)
    double.advance(59)
    assert await sandbox.is_running()
    machine = double.sandboxes[sandbox.sandbox_id].machine
    double.advance(2)
    await machine.wait_end()
    assert not await sandbox.is_running()
    with pytest.raises(SandboxNotFoundException):
        await sandbox.set_timeout(60)


async def test_connecting_lengthens_a_life_and_never_shortens_it(double: Double, sandbox: AsyncSandbox) -> None:
    await AsyncSandbox.connect(sandbox.sandbox_id, timeout=10, **settings(double))
    double.advance(LONG_S - 10)
    assert await sandbox.is_running()
    await AsyncSandbox.connect(sandbox.sandbox_id, timeout=LONG_S, **settings(double))
    double.advance(LONG_S - 10)
    assert await sandbox.is_running()


async def test_a_paused_sandbox_stands_still_and_goes_on(double: Double, sandbox: AsyncSandbox) -> None:
    count = "n=0; while :; do n=$((n+1)); echo $n > /tmp/m; mv /tmp/m /tmp/n; done"
    await sandbox.commands.run(count, background=True, timeout=0)
    machine = double.sandboxes[sandbox.sandbox_id].machine
    await run(sandbox, "until test -e /tmp/n; do :; done")
    await sandbox.pause()
    assert not await sandbox.is_running()
    first = machine.first_pid
    assert first is not None
    below = [psutil.Process(first), *psutil.Process(first).children(recursive=True)]
    # A child that ended just before the pause stays a zombie until the shell goes on.
    assert {one.status() for one in below} - {psutil.STATUS_ZOMBIE} == {psutil.STATUS_STOPPED}
    assert (await sandbox.get_info()).state is SandboxState.PAUSED
    assert await sandbox.pause() is False
    again = await AsyncSandbox.connect(sandbox.sandbox_id, **settings(double))
    before = await run(again, "cat /tmp/n")
    assert await run(again, f"while [ $(cat /tmp/n) = {before.strip()} ]; do :; done; echo more") == "more\n"


async def test_a_pause_cuts_the_streams_of_its_commands(sandbox: AsyncSandbox) -> None:
    command = await sandbox.commands.run("cat", background=True, stdin=True, timeout=0)
    await sandbox.pause()
    with pytest.raises(Exception, match=r"(?i)sandbox|connection|stream"):
        await command.wait()


async def test_a_paused_sandbox_takes_no_place(double: Double, sandbox: AsyncSandbox) -> None:
    double.max_sandboxes = 1
    await sandbox.pause()
    await AsyncSandbox.create(**settings(double))
    with pytest.raises(RateLimitException):
        await AsyncSandbox.connect(sandbox.sandbox_id, **settings(double))


async def test_a_sandbox_whose_time_ends_can_be_paused_instead(double: Double) -> None:
    sandbox = await AsyncSandbox.create(timeout=60, lifecycle={"on_timeout": "pause"}, **settings(double))
    double.advance(61)
    await asyncio.sleep(0)
    assert (await sandbox.get_info()).state is SandboxState.PAUSED


async def test_traffic_needs_the_token_of_the_sandbox(double: Double, sandbox: AsyncSandbox) -> None:
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    async with aiohttp.ClientSession(double.url, headers=headers) as session:
        async with session.get("/files", params={"path": "/etc/passwd"}) as answer:
            assert answer.status == 401
        async with session.get("/health") as answer:
            assert answer.status == 204


# ---------------------------------------------------------------------------------------------------------------------
# Commands


async def test_a_command_returns_its_output_and_exit_code(sandbox: AsyncSandbox) -> None:
    done = await sandbox.commands.run("echo out; echo err >&2; echo $WORD", envs={"WORD": "wörd"}, cwd="/tmp")
    assert (done.stdout, done.stderr, done.exit_code) == ("out\nwörd\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        await sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3


async def test_environment_of_the_sandbox_reaches_its_commands(double: Double) -> None:
    sandbox = await AsyncSandbox.create(envs={"GIVEN": "here"}, **settings(double))
    assert await run(sandbox, "echo $GIVEN") == "here\n"


async def test_commands_run_as_the_requested_user(sandbox: AsyncSandbox) -> None:
    assert await run(sandbox, "id -un; pwd") == "user\n/home/user\n"
    assert await run(sandbox, "id -un; pwd", user="root") == "root\n/root\n"
    with pytest.raises(AuthenticationException):
        await sandbox.commands.run("id", user="nobody-known")


async def test_a_command_reads_what_is_sent_to_it_in_order(sandbox: AsyncSandbox) -> None:
    seen: list[str] = []
    command = await sandbox.commands.run(
        "while read line; do echo got $line; done; echo end",
        background=True,
        stdin=True,
        timeout=0,
        on_stdout=seen.append,
    )
    for number in range(20):
        await command.send_stdin(f"{number}\n")
    await command.close_stdin()
    expected = "".join(f"got {number}\n" for number in range(20)) + "end\n"
    assert (await command.wait()).stdout == expected == "".join(seen)


async def test_much_input_and_output_comes_through_unharmed(sandbox: AsyncSandbox) -> None:
    command = await sandbox.commands.run("sha256sum; head -c 5000000 /dev/zero", background=True, stdin=True, timeout=0)
    for _ in range(40):
        await command.send_stdin("x" * 50_000)
    await command.close_stdin()
    done = await command.wait()
    digest, _, rest = done.stdout.partition("\n")
    assert digest.split()[0] == hashlib.sha256(b"x" * 2_000_000).hexdigest()
    assert rest == "\0" * 5_000_000


async def test_input_goes_over_one_ordered_stream(sandbox: AsyncSandbox) -> None:
    command = await sandbox.commands.run("cat", background=True, stdin=True, timeout=0)
    async with sandbox.commands.stream_input(command.pid) as handle:
        for number in range(50):
            await handle.send(f"{number} ")
    await command.close_stdin()
    assert (await command.wait()).stdout == "".join(f"{number} " for number in range(50))


async def test_a_command_whose_output_is_not_read_waits(double: Double, sandbox: AsyncSandbox) -> None:
    """Its writes do not pile up in the double."""
    headers = {
        "E2b-Sandbox-Id": sandbox.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": double.sandboxes[sandbox.sandbox_id].access_token or "",
        "Content-Type": "application/connect+json",
    }
    body = b'{"process": {"cmd": "/bin/sh", "args": ["-c", "yes & echo $! > /tmp/pid; wait"]}}'
    async with (
        aiohttp.ClientSession(double.url, headers=headers, read_bufsize=2**16) as session,
        session.post("/process.Process/Start", data=b"\0" + len(body).to_bytes(4, "big") + body) as answer,
    ):
        assert answer.status == 200
        command = next(iter(double.sandboxes[sandbox.sandbox_id].machine._commands.values()))
        # All buffers are full: the client's, the sockets', the queue of the stream, the runner's window.
        assert await eventually_async(command.subscribers[0].events.full)
        assert command.pending.qsize() < 100
    assert await run(sandbox, "kill $(cat /tmp/pid); echo killed") == "killed\n"


async def test_a_command_goes_on_without_its_stream_and_can_be_found_again(
    double: Double, sandbox: AsyncSandbox
) -> None:
    command = await sandbox.commands.run("cat", background=True, stdin=True, timeout=0)
    double.cut_all()
    with pytest.raises(Exception, match=r"(?i)connection|stream|sandbox"):
        await command.wait()
    assert [one.pid for one in await sandbox.commands.list()] == [command.pid]
    again = await sandbox.commands.connect(command.pid, timeout=0)
    await sandbox.commands.send_stdin(command.pid, "still there\n")
    await sandbox.commands.close_stdin(command.pid)
    assert (await again.wait()).stdout == "still there\n"
    with pytest.raises(NotFoundException):
        await sandbox.commands.connect(command.pid)


async def test_a_killed_command_ends_with_its_signal(sandbox: AsyncSandbox) -> None:
    command = await sandbox.commands.run("exec sleep 1000", background=True, timeout=0)
    assert await command.kill()
    with pytest.raises(CommandExitException) as failed:
        await command.wait()
    assert failed.value.exit_code == -1
    assert not await command.kill()


async def test_a_command_that_takes_too_long_is_ended(sandbox: AsyncSandbox) -> None:
    with pytest.raises(TimeoutException):
        await sandbox.commands.run("exec sleep 1000", timeout=HELD_S)

    async def has_ended() -> bool:
        return "sleep" not in await run(sandbox, "ps -eo comm")

    assert await eventually_awaited(has_ended)


async def test_a_terminal_is_a_real_one(sandbox: AsyncSandbox) -> None:
    seen = bytearray()
    terminal = await sandbox.pty.create(PtySize(rows=33, cols=77), on_data=lambda data: seen.extend(data), timeout=0)
    await sandbox.pty.send_stdin(terminal.pid, b"tty; stty size; exit\n")
    await terminal.wait()
    assert b"/dev/pts/" in seen
    assert b"33 77" in seen


# ---------------------------------------------------------------------------------------------------------------------
# Files


@pytest.mark.parametrize("size", [0, 1, 300_000, 3_000_000])
async def test_files_come_back_as_they_were(sandbox: AsyncSandbox, size: int) -> None:
    data = os.urandom(size)
    written = await sandbox.files.write("a/b/c.bin", data)
    assert written.path == "/home/user/a/b/c.bin"
    assert bytes(await sandbox.files.read("a/b/c.bin", format="bytes")) == data
    await sandbox.files.write("streamed", io.BytesIO(data), gzip=True)
    assert bytes(await sandbox.files.read("/home/user/streamed", format="bytes")) == data


async def test_several_files_go_in_one_request(double: Double, sandbox: AsyncSandbox) -> None:
    await sandbox.files.write_files([{"path": f"/home/user/f{number}", "data": str(number)} for number in range(3)])
    assert [await sandbox.files.read(f"f{number}") for number in range(3)] == ["0", "1", "2"]
    assert sum(one.method == "POST" and one.path == "/files" for one in double.requests) == 1


async def test_files_belong_to_the_user_who_wrote_them(sandbox: AsyncSandbox) -> None:
    await sandbox.files.write("/opt/executor/guest.pyz", b"guest", user="root")
    assert (await sandbox.files.get_info("/opt/executor/guest.pyz")).owner == "root"
    with pytest.raises(CommandExitException):
        await sandbox.commands.run("echo >> /opt/executor/guest.pyz")
    await sandbox.files.write("mine", "")
    assert (await sandbox.files.get_info("mine")).owner == "user"


async def test_directories_are_made_listed_moved_and_removed(sandbox: AsyncSandbox) -> None:
    assert await sandbox.files.make_dir("d/e")
    assert not await sandbox.files.make_dir("d/e")
    await sandbox.files.write("d/f", "1")
    assert sorted((one.name, one.size > 0) for one in await sandbox.files.list("d") if one.name == "f") == [("f", True)]
    assert {one.path for one in await sandbox.files.list(".", depth=2)} >= {"/home/user/d", "/home/user/d/e"}
    assert (await sandbox.files.rename("d", "g")).path == "/home/user/g"
    assert not await sandbox.files.exists("d")
    await sandbox.files.remove("g")
    assert not await sandbox.files.exists("g/f")
    with pytest.raises(FileNotFoundException):
        await sandbox.files.read("g/f")


async def test_a_pipe_is_no_file_to_wait_for(sandbox: AsyncSandbox) -> None:
    await sandbox.commands.run("mkfifo pipe")
    with pytest.raises(Exception, match="not a regular file"):
        await sandbox.files.read("pipe")


# ---------------------------------------------------------------------------------------------------------------------
# The wall


async def test_a_sandbox_sees_nothing_of_its_host(sandbox: AsyncSandbox) -> None:
    processes = await run(sandbox, "ps -eo pid,args", user="root")
    assert str(os.getpid()) not in processes.split()
    assert "pytest" not in processes
    with socket.create_server(("127.0.0.1", 0)) as server:
        refused = await run(sandbox, f"echo 2>/dev/null > /dev/tcp/127.0.0.1/{server.getsockname()[1]} || echo refused")
    assert refused == "refused\n"
    listed = await run(sandbox, "ls /sys/class/net /etc/shadow 2>/dev/null; ls -A /run /tmp", user="root")
    # The environment that the tests run in is shown where it is.
    environment = [Path(prefix).parts[2] for prefix in {sys.prefix, sys.base_prefix} if prefix.startswith("/tmp/")]
    assert listed.split() == ["/run:", "/tmp:", *sorted(set(environment))]


async def test_root_in_a_sandbox_is_nobody_on_its_host(double: Double, sandbox: AsyncSandbox) -> None:
    await sandbox.commands.run("sleep 1000", background=True, user="root", timeout=0)
    first = double.sandboxes[sandbox.sandbox_id].machine.first_pid
    assert first is not None
    below = psutil.Process(first)
    users = await eventually_async(
        lambda: {one.uids().effective for one in below.children(recursive=True) if one.name() == "sleep"}
    )
    assert users
    assert min(users) >= 1_000_000_000
    with pytest.raises(CommandExitException):
        await sandbox.commands.run("touch /usr/bin/mine", user="root")
    with pytest.raises(CommandExitException):
        await sandbox.commands.run("echo 1 > /proc/sys/kernel/panic", user="root")


async def test_root_in_a_sandbox_can_make_walls_of_its_own(sandbox: AsyncSandbox) -> None:
    inner = (
        "mount -t tmpfs -o size=1m none /srv && mount -t proc proc /proc && ps -eo pid= | head -1"
        " && setpriv --reuid 65533 --regid 65533 --clear-groups --no-new-privs id -u"
    )
    out = await run(sandbox, f"unshare --mount --pid --net --ipc --uts --fork sh -c '{inner}'", user="root")
    assert out.split() == ["1", "65533"]


async def test_sandboxes_are_apart(double: Double) -> None:
    one, other = [await AsyncSandbox.create(**settings(double)) for _ in range(2)]
    await one.files.write("/tmp/secret", "1")
    assert not await other.files.exists("/tmp/secret")
    first, second = [double.sandboxes[each.sandbox_id].machine.first_pid for each in (one, other)]
    assert os.readlink(f"/proc/{first}/ns/net") != os.readlink(f"/proc/{second}/ns/net")  # noqa: PTH115


async def test_a_machine_whose_first_process_ends_is_a_sandbox_that_was_not_found(
    double: Double, sandbox: AsyncSandbox
) -> None:
    first = double.sandboxes[sandbox.sandbox_id].machine.first_pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await double.sandboxes[sandbox.sandbox_id].machine.wait_end()
    assert not await sandbox.is_running()
    with pytest.raises(Exception, match="was not found"):
        await sandbox.commands.run("true")
    await double.vanish(sandbox.sandbox_id)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_double_that_is_killed_takes_its_sandboxes_with_it(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tests.support.e2b", "--faults", "status path=*/sandboxes status=500"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    below: list[psutil.Process] = []
    try:
        lines = [process.stdout.readline() for _ in range(4)]
        printed = dict(re.findall(r"export (\w+)=(\S+)", "".join(lines)))
        api = {
            "api_key": printed["E2B_API_KEY"],
            "api_url": printed["E2B_API_URL"],
            "sandbox_url": printed["E2B_SANDBOX_URL"],
        }
        with pytest.raises(Exception, match="500"):
            Sandbox.create(**api)
        assert Sandbox.create(**api).commands.run("echo here").stdout == "here\n"
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
    finally:
        process.send_signal(number)
        process.wait(30)
        process.stdout.close()
    assert process.returncode == (0 if number is signal.SIGTERM else -signal.SIGKILL)
    assert eventually(lambda: not any(one.is_running() for one in below))
    key_file = Path(lines[3].split()[-1])
    assert key_file.exists() is (number is signal.SIGKILL)
    shutil.rmtree(key_file.parent, ignore_errors=True)


# ---------------------------------------------------------------------------------------------------------------------
# The interpreter, and code that blocks


async def test_code_runs_in_contexts_that_keep_their_variables(double: Double) -> None:
    sandbox = await AsyncInterpreter.create(timeout=LONG_S, **settings(double))
    first = await sandbox.run_code("x = 20\nprint('said')\nx + 1")
    assert (first.text, first.logs.stdout, first.error) == ("21", ["said\n"], None)
    assert (await sandbox.run_code("x * 2")).text == "40"
    other = await sandbox.create_code_context()
    failed = await sandbox.run_code("x", context=other)
    assert failed.error is not None
    assert failed.error.name == "NameError"
    assert (await sandbox.run_code("!echo shell")).logs.stdout == ["shell\n"]
    assert (await sandbox.run_code("import numpy; int(numpy.arange(4).sum())")).text == "6"


async def test_code_whose_caller_gave_up_is_interrupted(double: Double) -> None:
    sandbox = await AsyncInterpreter.create(timeout=LONG_S, **settings(double))
    with pytest.raises(TimeoutException):
        await sandbox.run_code("kept = 1\nwhile True: pass", timeout=HELD_S)
    assert (await sandbox.run_code("kept")).text == "1"


async def test_an_interpreter_that_dies_is_reported_and_replaced(double: Double) -> None:
    sandbox = await AsyncInterpreter.create(timeout=LONG_S, **settings(double))
    died = await sandbox.run_code("import os; os._exit(1)")
    assert died.error is not None
    assert (await sandbox.run_code("1 + 1")).text == "2"


def test_code_that_blocks_has_a_double_in_a_thread(threaded: ThreadedDouble) -> None:
    with Interpreter.create(timeout=LONG_S, **settings(threaded)) as sandbox:
        assert sandbox.run_code("6 * 7").text == "42"
        assert sandbox.commands.run("cat /etc/hostname || hostname").stdout
        sandbox.files.write("f", "text")
        assert sandbox.files.read("f") == "text"
        command = sandbox.commands.run("cat", background=True, stdin=True)
        sandbox.commands.send_stdin(command.pid, "sent")
        sandbox.commands.close_stdin(command.pid)
        assert command.wait().stdout == "sent"
        threaded.advance(LONG_S - 1)
        assert sandbox.is_running()
    assert threaded.sandboxes == {}


def test_executor_of_smolagents_works_against_the_double(
    threaded: ThreadedDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    smolagents = pytest.importorskip("smolagents")
    for name, value in threaded.environment.items():
        monkeypatch.setenv(name, value)
    executor = smolagents.remote_executors.E2BExecutor([], smolagents.AgentLogger(smolagents.LogLevel.OFF))
    try:
        executor.send_variables({"numbers": [1, 2, 3]})
        executor.send_tools({"final_answer": smolagents.FinalAnswerTool()})
        assert "6" in executor("print(sum(numbers))").logs
        last = executor("final_answer({'sum': sum(numbers)})")
        assert last.is_final_answer
        assert last.output == {"sum": 6}
        with pytest.raises(smolagents.AgentError, match="ZeroDivisionError"):
            executor("1 / 0")
    finally:
        executor.cleanup()
        from tests.support.agents import mend_final_answer

        mend_final_answer()
    assert threaded.sandboxes == {}
