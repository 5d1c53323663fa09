"""The network of a session: its listener at the egress proxy, its usage, and the notices for its programs.

The proxy reports connections, refusals and bytes here, in the event loop. They are summed up for the session (in the
registry, so that limits hold over a restart) and for the execution during which they came (in the journal). Both are
written every `sweep_interval_s` while they change, the journal also with each connection; a killed daemon forgets at
most the bytes of one interval.

Attribution. A report counts for the first execution without a result. Reports and guest frames travel separately, so a
result waits until the proxy has reported all it did (`settle`). Background traffic while no execution runs counts for
the session alone, except for bytes of the last fifth of a second before an execution begins, since the proxy sums bytes
up for that long.

Notices. A refusal, or the end of a connection for a reason that the program could not guess, becomes a line in the log
of the step: once for each host and port, up to a limit. The notice of a refusal is a frame to the guest, which prints
it after the program's output; it is sent before the proxy answers the program, so it precedes the end of the step. A
program may see the end of a connection before the daemon does. So this notice, and any notice while a result waits, is
written to the journal instead: through the guest it could come too late for the step.

Quotas. A tenant's quota covers all its sessions, and reports come late. So a session may move only a window of bytes
beyond those reported, and asks admission for the next window when half of it is used. Without a window its connections
are closed and refused; `renew_window` is called when that may have changed.

Attack. A proxy that was taken over can report anything. The egress service has checked the form of the values, and all
that is kept here is bounded. Host names and messages may contain text that a program chose; they go to this session's
log, to records and to administrators, never to other tenants.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import structlog

from executor_server.backends.channel import GuestChannel, UnreachedError
from executor_server.core import (
    NO_NETWORK_USE,
    EgressConnection,
    EgressDenial,
    NetworkUsage,
    Reason,
    SandboxFailure,
    Unavailable,
)
from executor_server.guest.egress import reasons
from executor_server.guest.wire.messages import Hold, Note
from executor_server.network.egress import EgressError, RemoteListener
from executor_server.policy import host_to_ask
from executor_server.sessions.connection import GuestConnection
from executor_server.sessions.journal import Journal, SessionRecord
from executor_server.sessions.shared import SessionHooks

if TYPE_CHECKING:
    from executor_server.sessions.session import Session

# Seconds for the guest to hand the listener out and the proxy to serve it; a dead proxy is restarted meanwhile.
_OPEN_TIME_S = 20.0
# Seconds between two attempts to reopen the network of a recovered session.
_REOPEN_INTERVAL_S = 5.0
# Refusals, hosts and open connections that an administrator can see.
_MAX_DENIALS = 32
_MAX_HOSTS = 64
_MAX_OPEN = 1024
_RETRY_S = 5.0
# Different notices of one step, and characters of each.
_MAX_NOTICES = 20
_NOTICE_CHARS = 1024
_MORE = "further refusals of this step are not listed"

# Reasons for closing a connection that a program could not guess.
_ENDS = {
    reasons.SENT_BYTES: "the session has sent as much as max_sent_bytes allows",
    reasons.RECEIVED_BYTES: "the session has received as much as max_received_bytes allows",
    reasons.TENANT_QUOTA: "the tenant's quota egress_bytes_per_hour is spent",
    reasons.TIME_LIMIT: "it lasted as long as max_connection_s allows",
    reasons.RULE_GONE: "the policy has changed and does not allow it any more",
    reasons.PROXY_ENDED: "the egress proxy was restarted; connect again",
}

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class OpenConnection:
    """An open connection; until it ends, its bytes count only in the session's sum."""

    connection: EgressConnection
    execution_id: str  # during which it was opened; empty if none ran
    open_time_s: float  # Unix time


@dataclass
class HostUse:
    """What a session did with one host and port."""

    host: str
    port: int
    rule: str = ""  # the pattern that allowed its last connection
    connections: int = 0
    denied: int = 0
    sent_bytes: int = 0  # of connections that have ended
    received_bytes: int = 0


@dataclass(frozen=True)
class NetworkState:
    """The network of a session, for an administrator."""

    usage: NetworkUsage
    open: tuple[OpenConnection, ...]
    denials: tuple[tuple[float, EgressDenial], ...]  # the last ones, with their Unix times
    hosts: tuple[HostUse, ...]  # the last used one is last
    is_exhausted: bool  # the tenant's quota is spent


class SessionNetwork:
    """The network of one session; the egress proxy's sink. Without a listener in the sandbox, its calls do nothing."""

    def __init__(
        self,
        session: Session,
        record: SessionRecord,
        connection: GuestConnection,
        channel: GuestChannel,
        journal: Journal,
        hooks: SessionHooks,
    ) -> None:
        self._session = session
        self._connection = connection
        self._channel = channel
        self._journal = journal
        self._admission = hooks.admission
        self._approvals = hooks.approvals
        self._held = 0  # approvals that connections wait for
        self._observer = hooks.observer
        self._egress = hooks.egress if record.spec.sandbox.egress else None
        self.usage = record.network  # so far
        self._written = record.network
        self._step: Step | None = None
        self._open: dict[str, OpenConnection] = {}
        self._denials: deque[tuple[float, EgressDenial]] = deque(maxlen=_MAX_DENIALS)
        self._hosts: dict[tuple[str, int], HostUse] = {}
        self._window = 0
        self._bound_bytes: int | None = None  # on the sum of sent and received bytes; None: no quota
        self._is_exhausted = False
        self._applied: tuple[int | None, bool] = (None, False)  # bound and exhaustion, as the proxy knows them
        self._handed_out = asyncio.Event()  # set when the listener is handed out, or the attempt has ended
        self._is_begun = False  # the proxy may have the listener
        self._is_bound = False
        self._closed = False
        self._log = _log.bind(session_id=record.session_id, tenant=record.owner.tenant)

    # -- beginning and end ---------------------------------------------------------------------------------------

    async def open_during(self, configuring: Coroutine[Any, Any, None]) -> None:
        """Opens the network while the guest is configured; a prelude that connects early waits in the listener's queue.

        Raises what `configuring` raises, PreconditionFailed if the guest does not hand out its listener, which loses
        the session, and Unavailable if the proxy can't serve it.
        """
        if self._egress is None:
            await configuring
            return
        opening = asyncio.create_task(self._open_or_lose())
        opening.add_done_callback(lambda _: self._handed_out.set())
        try:
            # The guest does one thing at a time. It hands out its listener quickly; the configuration takes longer, and
            # meanwhile the proxy takes the listener over.
            await self._handed_out.wait()
            await configuring
            await opening
            self._session.require_alive()
        finally:
            configuring.close()
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    async def _open_or_lose(self) -> None:
        try:
            await self.open()
        except SandboxFailure as failure:
            await self._session.give_up_guest(str(failure))

    async def open(self) -> None:
        """Lets the proxy serve the sandbox's listener. Raises SandboxFailure; Unavailable if the proxy can't."""
        if self._egress is None:
            return
        try:
            async with asyncio.timeout(_OPEN_TIME_S):
                await self._bind()
        except (EgressError, TimeoutError) as error:
            self._log.error("network_not_opened", error=str(error) or f"not within {_OPEN_TIME_S:g} s")
            message = "the network of the session could not be opened: the egress proxy does not respond; try again"
            raise Unavailable(Reason.BACKEND_UNAVAILABLE, message, _RETRY_S) from error

    def recall(self) -> None:
        """Takes the larger of the registry's and the journal's counts, since either may have been written later."""
        executions = [each.network for each in self._journal.state.executions.values()]
        self.usage = _combined(lambda each: max(each[0], sum(each[1:])), self.usage, *executions)

    async def reopen(self) -> None:
        """Reopens the network of a recovered session, and retries while the proxy can't serve it.

        Connections wait in the listener's queue meanwhile, so that the session keeps its variables. The session is lost
        if the guest does not hand out the listener.

        The connections that waited for an approval under an earlier daemon have ended with its proxy, so the clock of
        executions runs again.
        """
        if self._session.spec.network.ask and not self._held:
            self._channel.send(Hold(held=False))
        try:
            await self.open()
        except Unavailable:
            await asyncio.sleep(_REOPEN_INTERVAL_S)
            self._session.spawn(self.reopen())
        except SandboxFailure as failure:
            await self._session.give_up_guest(f"after a restart of the daemon, {failure}")

    async def _bind(self) -> None:
        assert self._egress is not None, "a session without a network is bound"
        listener = await self._take_listener()
        self._handed_out.set()
        self._set_window(self._admission.network_window(self._session.facts))
        session_id, rules, bound = self._session.session_id, self._session.spec.network, self._bound_bytes
        self._is_begun = True
        await self._egress.bind(session_id, rules, listener, self, self.usage, bound)
        self._is_bound, self._applied = True, (bound, False)
        if self._closed:  # while the proxy answered
            await self.close()
            return
        if self._session.spec.network != rules:
            self.apply_rules()
        self.renew_window()

    async def _take_listener(self) -> socket.socket | RemoteListener:
        try:
            return await self._connection.take_listener()
        except UnreachedError:
            raise
        except SandboxFailure as failure:
            self._observer.guest_misbehaved(self._session.facts, str(failure))
            raise

    async def close(self) -> None:
        """Closes its connections, and waits for all reports. Idempotent."""
        self._closed = True
        if self._egress is not None and self._is_begun:
            await self._egress.release(self._session.session_id)

    # -- steering ------------------------------------------------------------------------------------------------

    def apply_rules(self) -> None:
        """Applies the changed rules of the session's spec; closes connections that they do not allow."""
        if self._egress is not None and self._is_bound:
            self._egress.change(self._session.session_id, self._session.spec.network)

    def renew_window(self) -> None:
        """Gets the next window from admission, and applies it."""
        if self._is_bound:
            self._set_window(self._admission.network_window(self._session.facts))
            self._apply_window()

    def _apply_window(self) -> None:
        assert self._egress is not None, "a session was bound without a proxy"
        session_id, applied = self._session.session_id, (self._bound_bytes, self._is_exhausted)
        if applied[0] != self._applied[0]:
            self._egress.allow(session_id, self._bound_bytes)
        if applied[1] != self._applied[1]:
            self._egress.exhaust(session_id, reasons.TENANT_QUOTA if self._is_exhausted else None)
        self._applied = applied

    def _set_window(self, window: int | None) -> None:
        self._is_exhausted = window == 0
        self._window = window or 0
        self._bound_bytes = None if window is None else self._moved_bytes + window

    # -- reports -------------------------------------------------------------------------------------------------

    def connection_opened(self, connection: EgressConnection) -> None:
        execution_id = self._current_step().execution_id
        self._add(connections=1)
        use = self._use_of(connection.host, connection.port)
        use.rule, use.connections = connection.rule, use.connections + 1
        self.note_step()
        if len(self._open) < _MAX_OPEN:
            self._open[connection.connection_id] = OpenConnection(connection, execution_id, time.time())
        self._observer.connection_opened(self._session.facts, execution_id, connection)

    def connection_closed(self, connection: EgressConnection) -> None:
        opened = self._open.pop(connection.connection_id, None)
        execution_id = opened.execution_id if opened is not None else ""
        use = self._use_of(connection.host, connection.port)
        use.sent_bytes += connection.sent_bytes or 0
        use.received_bytes += connection.received_bytes or 0
        if (notice := notice_of_end(connection)) is not None and not self._closed:
            self._notify(notice)
        self._observer.connection_closed(self._session.facts, execution_id, connection)

    def connection_denied(self, denial: EgressDenial) -> None:
        execution_id = self._current_step().execution_id
        self._add(denied=1)
        self._use_of(denial.host, denial.port).denied += 1
        self._denials.append((time.time(), denial))
        # Sent first: the proxy's answer to the program follows.
        self._notify(notice_of_denial(denial))
        self._observer.connection_denied(self._session.facts, execution_id, denial)

    def _use_of(self, host: str, port: int) -> HostUse:
        """Returns the use of a host, which is now the last used one."""
        use = self._hosts.pop((host, port), None) or HostUse(host, port)
        if len(self._hosts) >= _MAX_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        self._hosts[host, port] = use
        return use

    async def host_asked(self, host: str, port: int) -> str:
        spec, facts, wanted = self._session.spec, self._session.facts, host_to_ask(self._session.spec, host, port)
        execution_id = next(iter(self._journal.state.running), "")
        self._hold(+1)
        try:
            ruling = await self._approvals.ask(
                facts.owner.tenant,
                facts.session_id,
                execution_id,
                wanted,
                spec.approval_wait_s,
            )
        finally:
            self._hold(-1)
        return "" if ruling.approved else f"{ruling.reason} (network.ask of the policy); go on without this host"

    def _hold(self, change: int) -> None:
        """Stops the wall clock of executions while connections wait for an approval."""
        before, self._held = self._held, self._held + change
        if not self._closed and bool(before) != bool(self._held):
            self._channel.send(Hold(held=bool(self._held)))

    def denials_uncounted(self, count: int) -> None:
        execution_id = self._current_step().execution_id
        self._add(denied=count)
        self._observer.denials_uncounted(self._session.facts, execution_id, count)

    def moved(self, sent_bytes: int, received_bytes: int) -> None:
        self._current_step()
        self._add(sent_bytes=sent_bytes, received_bytes=received_bytes)
        self._observer.network_moved(self._session.facts, sent_bytes, received_bytes)
        if self._bound_bytes is not None and self._bound_bytes - self._moved_bytes <= self._window // 2:
            self.renew_window()

    def _add(self, **more: int) -> None:
        self.usage = _combined(sum, self.usage, NetworkUsage(**more))

    @property
    def _moved_bytes(self) -> int:
        return self.usage.sent_bytes + self.usage.received_bytes

    def listener_misused(self) -> None:
        # Only the sandbox's first process has the listener, so that process was taken over.
        self._observer.guest_misbehaved(self._session.facts, "it tried to block the egress proxy by its listener")
        if not self._closed:
            self._session.spawn(self._session.give_up_guest("the sandbox tried to block the egress proxy"))

    # -- steps ---------------------------------------------------------------------------------------------------

    def _current_step(self) -> Step:
        """Returns the step that a report counts for. Must be called before the report is added to the usage."""
        execution_id = next(iter(self._journal.state.running), "")
        step = self._step
        if step is None or step.execution_id != execution_id:
            self.note_step()
            execution = self._journal.state.running.get(execution_id)
            used = execution.network if execution is not None else NO_NETWORK_USE
            step = self._step = Step(execution_id, self.usage, used)
        return step

    def note_step(self) -> None:
        """Writes the usage of the running execution. Must be called regularly, and before its end."""
        step = self._step
        if step is not None and step.execution_id:
            self._journal.note_network(step.execution_id, step.usage(self.usage))

    async def settle(self) -> None:
        """Waits until the proxy has reported all it did so far, and writes the usage."""
        if self._egress is not None and self._is_bound:
            await self._egress.settle(self._session.session_id)
        self.note_step()

    def unwritten(self) -> NetworkUsage | None:
        """Returns the usage for the registry; None if the registry has it."""
        if self._step is None:  # no report has come
            return None
        self.note_step()
        usage = self.usage
        return usage if usage != self._written else None

    def note_written(self, usage: NetworkUsage) -> None:
        self._written = usage

    def _notify(self, notice: Notice) -> None:
        """Adds a line to the log of the current step, up to its limit."""
        step = self._current_step()
        if (text := step.line_of(notice)) is None:
            return
        if step.execution_id and (notice.is_end or step.execution_id in self._journal.state.undecided):
            self._journal.add_notice(step.execution_id, text)
        else:
            self._channel.send(Note(), text.encode("utf-8", "replace"))

    # -- reporting -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> NetworkState:
        hosts = tuple(self._hosts.values())
        return NetworkState(self.usage, tuple(self._open.values()), tuple(self._denials), hosts, self._is_exhausted)


def _combined(combine: Callable[[tuple[int, ...]], int], *usages: NetworkUsage) -> NetworkUsage:
    """Combines usages field by field."""
    return NetworkUsage(*map(combine, zip(*(vars(usage).values() for usage in usages), strict=True)))


@dataclass(frozen=True)
class Notice:
    """A line for the log of a step; only the first one of a subject is printed."""

    subject: tuple[str, int, str]
    text: str
    is_end: bool  # a connection has ended; otherwise something was refused


def notice_of_denial(denial: EgressDenial) -> Notice:
    return Notice((denial.host, denial.port, ""), denial.sentence, is_end=False)


def notice_of_end(connection: EgressConnection) -> Notice | None:
    """Returns the notice of an end; None if the program could guess it."""
    why = _ENDS.get(connection.reason)
    if why is None:
        return None
    subject = (connection.host, connection.port, connection.reason)
    return Notice(subject, f"the connection to {connection.host}:{connection.port} was closed: {why}", is_end=True)


@dataclass
class Step:
    """The execution that reports count for, or the time between two executions."""

    execution_id: str  # empty when none runs
    before: NetworkUsage  # used by the session, at its beginning
    used: NetworkUsage  # used by the execution, under an earlier daemon
    _noticed: set[tuple[str, int, str]] = field(default_factory=set)

    def usage(self, now: NetworkUsage) -> NetworkUsage:
        """Returns its usage, given the session's current usage."""
        return _combined(lambda each: each[0] + each[1] - each[2], self.used, now, self.before)

    def line_of(self, notice: Notice) -> str | None:
        """Returns the line to print; None if its subject had one, or the step has its maximum."""
        if notice.subject in self._noticed or len(self._noticed) > _MAX_NOTICES:
            return None
        self._noticed.add(notice.subject)
        text = notice.text[:_NOTICE_CHARS] if len(self._noticed) <= _MAX_NOTICES else _MORE
        return f"network: {text}\n"
