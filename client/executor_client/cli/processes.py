"""`executor shell`, `exec` of a command, and `attach`: processes of a session, with this terminal or with pipes.

They run on one event loop with the asyncio client: keys, output, sizes and signals can each end the others, which a
thread in a blocking read does not allow.

The exit code is the process's own, or 128 plus the number of the signal that ended it. 124: timeout, as in timeout(1).
127: no such command. 126: it can't be executed. 2: it could not be run, or its end is unknown.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

from executor_client._core.endpoint import TlsConfig
from executor_client._core.process import EXIT_CODES
from executor_client._core.session_base import short_id
from executor_client.aio import AsyncExecutorClient
from executor_client.aio_process import AsyncProcess
from executor_client.aio_session import AsyncSession
from executor_client.cli import EXIT_REFUSED, EXIT_SUCCEEDED
from executor_client.cli.console import Console
from executor_client.cli.conversation import Conversation, ConversationEnd
from executor_client.cli.descriptors import read_some
from executor_client.cli.detach_keys import DetachKeys
from executor_client.cli.local_terminal import LocalTerminal, own_terminal
from executor_client.cli.naming import matching_id, matching_process, names_of, refuse_for_existing
from executor_client.cli.process_output import ProcessOutput, stdin_is_given
from executor_client.errors import (
    ConnectionLost,
    ExecutorClientError,
    InvalidRequest,
    PreconditionError,
    UnavailableError,
)
from executor_client.process_results import ProcessResult, TerminalSize
from executor_client.waits import OnWait, Wait

EXIT_TIMEOUT = 124
EXIT_HUNG_UP = 129

_SHELL = 'exec "${BASH:-sh}"'
_STDIN = 0
_ID_DIGITS = 12
_PASSED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class _Waits:
    """Passes the client's waits to the code that currently uses the terminal."""

    on_wait: OnWait

    def __call__(self, wait: Wait) -> None:
        self.on_wait(wait)


@dataclass(frozen=True)
class _Context:
    """The client, options and console of one command."""

    client: AsyncExecutorClient
    options: argparse.Namespace
    console: Console
    waits: _Waits = field(repr=False)


def run(options: argparse.Namespace, tls: TlsConfig | None, console: Console) -> int:
    """Runs the command that the options name. Returns the exit code. Raises ExecutorClientError, OSError."""
    return asyncio.run(_run(options, tls, console))


async def _run(options: argparse.Namespace, tls: TlsConfig | None, console: Console) -> int:
    waits = _Waits(console.show_wait)
    async with AsyncExecutorClient(options.address, token=options.token, tls=tls, on_wait=waits) as client:
        return await _COMMANDS[options.command](_Context(client, options, console, waits))


async def find_session(client: AsyncExecutorClient, text: str) -> AsyncSession:
    """Returns the caller's session that the text names. Raises NotFoundError, InvalidRequest."""
    return await client.get_session(matching_id(names_of(await client.list_sessions()), text))


# ---------------------------------------------------------------------------------------------------------------------
# With a terminal


async def _shell(context: _Context) -> int:
    options = context.options
    terminal = own_terminal("shell")
    command: str | list[str] = _SHELL if options.shell is None else [options.shell]
    async with _shell_session(context) as kept:
        process = await _start_on(kept.session, terminal, command, options)
        try:
            end = await _talk_as_owner(context, process, terminal)
        except (ConnectionLost, UnavailableError):
            kept.is_kept = True
            context.console.remark(f"if the daemon comes back, {_how_to_reattach(kept.session, process)}")
            raise
        kept.is_kept = kept.is_kept or end is ConversationEnd.DETACHED
    return _left(context, kept.session, process, end)


@dataclass
class _Kept:
    """A session, and whether it is kept when the block ends."""

    session: AsyncSession
    is_kept: bool


@contextlib.asynccontextmanager
async def _shell_session(context: _Context) -> AsyncIterator[_Kept]:
    """Yields the session that the options name, or a new one, which ends with the shell unless it has a name.

    It is created detached, because the user may later detach from its shell.
    """
    options = context.options
    if options.session is not None:
        refuse_for_existing(options, imports=options.imports)
        yield _Kept(await find_session(context.client, options.session), is_kept=True)
        return
    made = await context.client.create_session(
        options.image,
        options.imports,
        dict(options.limits),
        {"client": "executor"},
        network=options.network,
        packages=options.packages,
        node_labels=dict(options.node_labels),
        name=options.name,
        detached=True,
    )
    kept = _Kept(made, is_kept=options.name is not None)
    try:
        yield kept
    finally:
        if not kept.is_kept:
            await made.close()


async def _start_on(
    session: AsyncSession,
    terminal: LocalTerminal,
    command: str | list[str],
    options: argparse.Namespace,
    timeout_s: float | None = None,
) -> AsyncProcess:
    return await session.processes.start(
        command,
        cwd=options.cwd,
        env=dict(options.variables),
        pty=TerminalSize(*terminal.size()),
        timeout_s=timeout_s,
    )


async def _talk_as_owner(context: _Context, process: AsyncProcess, terminal: LocalTerminal) -> ConversationEnd:
    """Connects a process that was started for this terminal. If the terminal goes away, the process gets SIGHUP, like a
    local process: shells of closed windows must not fill the session."""
    try:
        end = await _talk(context, process, terminal)
    except asyncio.CancelledError:
        await _hang_up(process)
        raise
    if end is ConversationEnd.TERMINAL_GONE:
        await _hang_up(process)
    return end


async def _hang_up(process: AsyncProcess) -> None:
    with contextlib.suppress(ExecutorClientError):  # the session has ended, or the daemon is away
        await process.signal(signal.SIGHUP, "tree")


async def _talk(
    context: _Context, process: AsyncProcess, terminal: LocalTerminal, *, replayed_to: int = 0
) -> ConversationEnd:
    """Connects the process with our terminal until it ends or we detach. Always restores the terminal."""
    context.console.end_wait()

    async def resize(columns: int, rows: int) -> None:
        await process.resize(TerminalSize(columns, rows))

    try:
        with terminal:
            keys = DetachKeys(context.options.detach_keys)
            conversation = Conversation(process, resize, terminal, keys, replayed_to=replayed_to)
            context.waits.on_wait = conversation.show_wait
            end = await conversation.run()
            if end is ConversationEnd.DETACHED:
                terminal.drop_typed()
            return end
    finally:
        context.waits.on_wait = context.console.show_wait


def _left(context: _Context, session: AsyncSession, process: AsyncProcess, end: ConversationEnd) -> int:
    """Reports how we left a process, and returns the exit code."""
    if end is ConversationEnd.TERMINAL_GONE:
        return EXIT_HUNG_UP
    if end is ConversationEnd.DETACHED:
        context.console.remark(f"detached; {_how_to_reattach(session, process)}")
        return EXIT_SUCCEEDED
    return _exit_code(context.console, process.result)


def _how_to_reattach(session: AsyncSession, process: AsyncProcess) -> str:
    name = session.name or short_id(session.session_id, _ID_DIGITS)
    return f"`executor attach {name} {process.process_id[:_ID_DIGITS]}` reattaches"


async def _attach(context: _Context) -> int:
    session = await find_session(context.client, context.options.session)
    info = matching_process(await session.processes.list(), context.options.process)
    if not info.has_pty:
        process = await session.processes.attach(info.process_id)
        return await _follow(context, session, process)
    terminal = own_terminal("attach")
    process = await session.processes.attach(info.process_id)
    end = await _talk(context, process, terminal, replayed_to=info.last_event)
    return _left(context, session, process, end)


async def _follow(context: _Context, session: AsyncSession, process: AsyncProcess) -> int:
    """Shows the output of a process without a terminal. Ctrl-C detaches; the process continues."""
    task = asyncio.create_task(_show(context, process))
    with _on_signals({signal.SIGINT: task.cancel}):
        await asyncio.wait([task])
    if task.cancelled():
        return _left(context, session, process, ConversationEnd.DETACHED)
    task.result()
    return _exit_code(context.console, process.result)


# ---------------------------------------------------------------------------------------------------------------------
# With pipes


async def _execute(context: _Context) -> int:
    options = context.options
    if options.code is not None or not options.argv:
        raise InvalidRequest("pass one command after --: executor exec SESSION -- COMMAND ARG...")
    session = await find_session(context.client, options.session)
    # A single argument with a space is a command line for the shell.
    command = options.argv[0] if len(options.argv) == 1 and " " in options.argv[0] else options.argv
    try:
        if options.tty:
            terminal = own_terminal("exec -t")
            process = await _start_on(session, terminal, command, options, options.timeout)
            return _left(context, session, process, await _talk_as_owner(context, process, terminal))
        takes_stdin = stdin_is_given() and not (options.no_stdin or options.detach)
        process = await session.processes.start(
            command,
            cwd=options.cwd,
            env=dict(options.variables),
            stdin=takes_stdin,
            timeout_s=options.timeout,
        )
    except ExecutorClientError as error:
        if error.reason not in EXIT_CODES:
            raise
        context.console.fail(error.message)
        return EXIT_CODES[error.reason]
    if options.detach:
        context.console.show_lines([process.process_id])
        process.close()
        return EXIT_SUCCEEDED
    return await _run_with_pipes(context, process, takes_stdin=takes_stdin)


async def _run_with_pipes(context: _Context, process: AsyncProcess, *, takes_stdin: bool) -> int:
    """Forwards input and output until the process ends. Ctrl-C interrupts it, a second one kills it.

    Kills the command if its output can't be delivered: the reader, or the connection, is gone.
    """
    interrupts = _Interrupts(process)
    showing = asyncio.create_task(_show(context, process))
    feeding = asyncio.create_task(_feed(process) if takes_stdin else _nothing())
    try:
        with _on_signals({number: interrupts.take(number) for number in _PASSED_SIGNALS}):
            done, _ = await asyncio.wait([showing, feeding], return_when=asyncio.FIRST_COMPLETED)
            if feeding in done:
                feeding.result()  # raises its error
            await showing
    except BaseException:
        with contextlib.suppress(ExecutorClientError):
            await process.kill()
        raise
    finally:
        await interrupts.close()
        for task in (showing, feeding):
            task.cancel()
        await asyncio.gather(showing, feeding, return_exceptions=True)
    return _exit_code(context.console, process.result)


async def _nothing() -> None:
    pass


async def _show(context: _Context, process: AsyncProcess) -> None:
    output = ProcessOutput(context.console, raw=context.options.raw)
    async for event in process:
        await output.show(event)
    output.finish()


async def _feed(process: AsyncProcess) -> None:
    """Forwards standard input until it ends, or until the process stops reading."""
    with contextlib.suppress(PreconditionError):
        while piece := await read_some(_STDIN):
            await process.write(piece)
        await process.close_stdin()


class _Interrupts:
    """Forwards signals to the process; the second interrupt kills it."""

    def __init__(self, process: AsyncProcess) -> None:
        self._process = process
        self._sending: set[asyncio.Task[None]] = set()
        self._interrupted = False

    def take(self, number: signal.Signals) -> Callable[[], None]:
        return lambda: self._begin(number)

    def _begin(self, number: signal.Signals) -> None:
        kills = number is signal.SIGINT and self._interrupted
        self._interrupted = True
        sending = asyncio.create_task(self._send(number, kills=kills))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _send(self, number: signal.Signals, *, kills: bool) -> None:
        with contextlib.suppress(ExecutorClientError):  # the reader of the output gets the error
            await (self._process.kill() if kills else self._process.signal(number))

    async def close(self) -> None:
        await asyncio.gather(*self._sending)


@contextlib.contextmanager
def _on_signals(handlers: dict[signal.Signals, Callable[[], object]]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _exit_code(console: Console, result: ProcessResult | None) -> int:
    assert result is not None
    match result.outcome:
        case "timeout":
            console.fail("timeout")
            return EXIT_TIMEOUT
        case "lost":
            console.fail(f"the process is lost: {result.lost_reason}")
            return EXIT_REFUSED
    return EXIT_REFUSED if result.exit_code is None else result.exit_code


async def _forward(context: _Context) -> int:
    from executor_client.cli import port_forward

    session = await find_session(context.client, context.options.session)
    return await port_forward.forward(session, context.options, context.console)


_COMMANDS: dict[str, Callable[[_Context], Awaitable[int]]] = {
    "shell": _shell,
    "exec": _execute,
    "attach": _attach,
    "port-forward": _forward,
}
