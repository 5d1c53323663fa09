"""The egress service: keeps the proxy's process running, and the sessions bound to whichever process there is.

Theory of operation. The first session, or `prepare`, starts the process; a daemon whose policy grants no network never
has one. From then on one task, `_supervise`, owns it: it starts a process, gives it the secrets, binds all
sessions, and waits for its end. Then it reports all open connections as ended, and starts another one, at first
at once and then with growing pauses. Listeners belong to the sessions and not to the process, so programs that connect
meanwhile wait in the kernel's queue and are served by the next one.

Messages to a missing process are dropped: the state that they would change is kept here, and the next process
gets it with the bind. Every wait for an answer has a deadline.

A process that does not answer at all is ended like one that died. One that breaks the form of a message is ended too,
because it has a fault or was taken over, and a new one is cheap. Odd values are dropped and counted, since a sandbox
may have found out how to cause them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from executor_server.core import NetworkRules, NetworkUsage
from executor_server.network.egress.bound import BoundSession
from executor_server.network.egress.bundle import build_bundle
from executor_server.network.egress.commands import Commands, Message, ProxyEnded
from executor_server.network.egress.interface import EgressError, EgressSettings, EgressSink, RemoteListener
from executor_server.network.egress.machine import MachineProxy
from executor_server.network.egress.proxy_process import PROXY_COMMAND, ProxyProcess
from executor_server.network.egress.secret_files import open_secrets

_START_S = 30.0
_ANSWER_S = 10.0
_SETTLE_S = 1.0
# The proxy gives connections five seconds to close.
_RELEASE_S = 7.0
_PING_INTERVAL_S = 10.0
_PING_S = 20.0
_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 10.0
# A process that ran for longer did not fail at its start.
_STEADY_S = 30.0

_log = structlog.get_logger(__name__)


class EgressService:
    """Implements `Egress`."""

    def __init__(self, settings: EgressSettings, directory: Path, *, command: Sequence[str] = PROXY_COMMAND) -> None:
        """`directory` is the service's own, below the state directory; it is created when it is needed."""
        self._settings = settings
        self._command = command
        self._directory = directory
        self._bundle: Path | None = None
        self._bundle_lock = threading.Lock()
        self._sessions: dict[str, BoundSession] = {}
        self._process: ProxyProcess | None = None  # one that is ready
        self._supervisor: asyncio.Task[None] | None = None
        self._waiting: set[asyncio.Future[ProxyProcess]] = set()  # for a process that is ready
        self._end: asyncio.Future[str]  # completes when the running process ends, with the reason
        self._secret_problems: list[str] = []
        self._started: ProxyProcess | None = None  # one that is starting or ready
        self._commands = Commands(self._write, self._sessions.get, self._note_end)
        self._machines: dict[str, MachineProxy] = {}  # of the sessions whose sandboxes are on other machines
        self._changes: set[asyncio.Task[None]] = set()  # of these machines' own networks
        self.restarts = 0
        """How often a process was replaced."""

    # ------------------------------------------------------------------------------------------------------------------
    # Its life

    async def start(self) -> None:
        """Checks the files of secrets, so that the daemon does not serve with an unusable one.

        Starts nothing. Raises EgressError, which says for each file what to do.
        """
        with open_secrets(self._settings.secrets) as (_, problems):
            if problems:
                raise EgressError(" ".join(problems))

    async def prepare(self) -> None:
        """Starts the process before the first session. Raises EgressError if it can't be started.

        For a policy that grants a network: the first session is then created as quickly as later ones, and wrong
        settings are found at the daemon's start.
        """
        await asyncio.to_thread(lambda: self.ca_bundle)
        await self._running()
        if self._secret_problems:
            raise EgressError(" ".join(self._secret_problems))

    async def close(self) -> None:
        """Ends the process and all open connections. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervisor
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)
        await asyncio.gather(*(machine.close() for machine in self._machines.values()))
        self._machines.clear()

    @property
    def pid(self) -> int | None:
        """The process id, if one runs."""
        return None if self._process is None else self._process.pid

    @property
    def ca_bundle(self) -> Path:
        # Backends ask in threads, several of them at the same time.
        with self._bundle_lock:
            if self._bundle is None:
                self._bundle = build_bundle(self._directory, self._settings.ca_file)
            return self._bundle

    async def reload_secrets(self) -> None:
        """Reads the files of all secrets again. Raises EgressError; the earlier secrets stay in use then."""
        with open_secrets(self._settings.secrets) as (opened, problems):
            if problems:
                raise EgressError(" ".join(problems))
            if self._process is not None:
                await self._send_secrets(self._process, opened, partial=False)

    # ------------------------------------------------------------------------------------------------------------------
    # Sessions

    async def bind(
        self,
        session_id: str,
        rules: NetworkRules,
        listener: socket.socket | RemoteListener,
        sink: EgressSink,
        used: NetworkUsage,
        total_bytes: int | None = None,
    ) -> None:
        if not isinstance(listener, socket.socket):
            await self._bind_machine(BoundSession(session_id, rules, None, sink, used, total_bytes), listener)
            return
        session = BoundSession(session_id, rules, listener, sink, used, total_bytes)
        try:
            process = await self._running()
            if (earlier := self._sessions.get(session_id)) is not None:
                session.follow(earlier)
            self._sessions[session_id] = session  # before the answer: reports may come with it
            try:
                await self._bind(process, session)
            except ProxyEnded:
                await self._bind(await self._running(), session)
        except BaseException:
            self._forget(session)
            raise

    async def _bind_machine(self, session: BoundSession, listener: RemoteListener) -> None:
        await self.release(session.session_id)
        machine = self._machines[session.session_id] = MachineProxy(session, listener, self._settings.internal)
        try:
            await machine.open()
        except BaseException:
            self._machines.pop(session.session_id, None)
            await machine.close()
            raise

    def _forget(self, session: BoundSession) -> None:
        if self._sessions.get(session.session_id) is session:
            del self._sessions[session.session_id]
            if self._process is not None:
                self._commands.ask_and_forget({"type": "end", "session": session.session_id})
        session.close()

    def change(self, session_id: str, rules: NetworkRules) -> None:
        if (session := self._session(session_id)) is not None:
            session.rules = rules
            self._send(session, session.change_message())
        if (machine := self._machines.get(session_id)) is not None:
            change = asyncio.create_task(machine.allow(rules))
            self._changes.add(change)
            change.add_done_callback(self._changes.discard)

    def allow(self, session_id: str, total_bytes: int | None) -> None:
        if (session := self._session(session_id)) is not None:
            session.total_bytes = total_bytes
            self._send(session, session.allow_message())

    def exhaust(self, session_id: str, reason: str | None) -> None:
        if (session := self._session(session_id)) is not None:
            session.exhausted = reason
            self._send(session, session.exhaust_message())

    def _session(self, session_id: str) -> BoundSession | None:
        machine = self._machines.get(session_id)
        return self._sessions.get(session_id) if machine is None else machine.session

    async def settle(self, session_id: str) -> None:
        """Asks the proxy only if it may have something to report.

        Each connection is reported before its program gets a byte over it, and each refusal before its answer leaves.
        So the reports of a step have arrived with its result, though they may not be read yet. A session without a
        report since it was settled, and without an open connection, has none; most steps need no exchange.
        """
        if (machine := self._machines.get(session_id)) is not None:
            await machine.settle()
            return
        session, process = self._sessions.get(session_id), self._process
        if session is None or process is None:
            return
        process.read_arrived()
        if session.is_settled or self._process is None:
            return
        with contextlib.suppress(EgressError):
            await self._commands.ask({"type": "settle", "session": session_id}, _SETTLE_S)
            session.note_settled()

    async def release(self, session_id: str) -> None:
        if (machine := self._machines.pop(session_id, None)) is not None:
            await machine.close()
        if (session := self._sessions.get(session_id)) is None:
            return
        try:
            if self._process is not None:
                with contextlib.suppress(EgressError):
                    await self._commands.ask({"type": "end", "session": session_id}, _RELEASE_S)
        finally:
            if self._sessions.get(session_id) is session:
                del self._sessions[session_id]
            session.close()

    # ------------------------------------------------------------------------------------------------------------------
    # The process

    async def _running(self) -> ProxyProcess:
        """Returns the ready process, or waits for the next one. Raises EgressError."""
        if self._process is not None:
            return self._process
        if self._supervisor is None or self._supervisor.done():
            self._supervisor = asyncio.create_task(self._supervise())
        waiting: asyncio.Future[ProxyProcess] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(_START_S):
                return await waiting
        except TimeoutError:
            raise EgressError(
                f"The egress proxy does not run, and did not start within {_START_S:g} seconds."
            ) from None
        finally:
            self._waiting.discard(waiting)

    async def _supervise(self) -> None:
        """Keeps a process running, from the first session on."""
        pause_s = 0.0
        while True:
            began = time.monotonic()
            why = await self._run_one()
            self.restarts += 1
            if not self._sessions and not self._waiting:
                # No session needs a process; the next session starts one.
                _log.warning("egress_proxy_gone", reason=why)
                return
            if time.monotonic() - began > _STEADY_S:
                pause_s = 0.0
            _log.warning("egress_proxy_restarts", reason=why, sessions=len(self._sessions), pause_s=pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_BACKOFF_S, max(_BACKOFF_S, 2 * pause_s))

    async def _run_one(self) -> str:
        """Runs one process to its end; returns the reason, as a clause."""
        self._end = asyncio.get_running_loop().create_future()
        process = self._started = ProxyProcess(self._command, self._commands.take, self._note_end)
        try:
            await process.start(self._settings, str(self._directory))
            self._secret_problems = await self._send_all_secrets(process)
            self._process = process
            sessions = list(self._sessions.values())
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_result(process)
            await self._bind_again(process, sessions)
            return await self._watch(process)
        except EgressError as error:
            for waiting in self._waiting:
                if not waiting.done():
                    waiting.set_exception(error)
            return str(error)
        except Exception:  # noqa: BLE001 - a mistake of ours must not leave all sessions without a network
            _log.exception("egress_supervision_failed")
            return "the supervision of the egress proxy failed"
        finally:
            self._process = self._started = None
            self._commands.fail_all()
            try:
                await _finished(process.close())
            finally:  # not before: it may report the end of a connection until its link is closed
                for session in self._sessions.values():
                    session.abandon()

    async def _watch(self, process: ProxyProcess) -> str:
        while True:
            done, _ = await asyncio.wait({self._end}, timeout=_PING_INTERVAL_S)
            if done:
                return self._end.result()
            await self._commands.ask({"type": "settle", "session": ""}, _PING_S)

    def _note_end(self, why: str) -> None:
        if not self._end.done():
            self._end.set_result(why)

    async def _send_all_secrets(self, process: ProxyProcess) -> list[str]:
        """Gives a new process the usable secrets; requests that need others are refused."""
        with open_secrets(self._settings.secrets) as (opened, problems):
            try:
                await self._send_secrets(process, opened, partial=True)
            except EgressError as error:
                problems = [*problems, str(error)]
        for problem in problems:
            _log.error("egress_secret_unusable", problem=problem)
        return problems

    async def _send_secrets(self, process: ProxyProcess, opened: Mapping[str, int], *, partial: bool) -> None:
        for name, descriptor in opened.items():
            process.send({"type": "secret", "name": name}, descriptor)
        await self._commands.ask({"type": "secrets", "partial": partial}, _ANSWER_S)

    async def _bind_again(self, process: ProxyProcess, sessions: Sequence[BoundSession]) -> None:
        results = await asyncio.gather(*(self._bind(process, each) for each in sessions), return_exceptions=True)
        for session, result in zip(sessions, results, strict=True):
            if isinstance(result, EgressError):
                _log.error("egress_session_unserved", session_id=session.session_id, reason=str(result))
            elif isinstance(result, BaseException):
                raise result

    async def _bind(self, process: ProxyProcess, session: BoundSession) -> None:
        assert session.listener is not None, "a session of another machine is bound to the process of this host"
        answer = self._commands.asked(session.bind_message(), session.listener.fileno())
        if session.exhausted is not None:
            process.send(session.exhaust_message())
        await self._commands.answer(answer, _ANSWER_S)

    # ------------------------------------------------------------------------------------------------------------------
    # Messages

    def _write(self, message: Message, descriptor: int | None) -> None:
        if self._started is not None:
            self._started.send(message, descriptor)

    def _send(self, session: BoundSession, message: Message) -> None:
        if (machine := self._machines.get(session.session_id)) is not None:
            machine.send(message)
        elif self._process is not None:
            self._commands.send(message)


async def _finished(work: Coroutine[Any, Any, None]) -> None:
    """Waits until the work, which has a timeout, is done, even if the waiting task is cancelled."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise
