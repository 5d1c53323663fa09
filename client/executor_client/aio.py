"""The asyncio client: connects to a daemon, creates sessions and finds them again."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any, Self

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_api.v1 import executor_service_pb2 as pb
from executor_client._aio import AsyncTransport, off_loop, on_disk, run_blocking, shielded, wait_for
from executor_client._core import approvals, convert, endpoint, missing_modules, requests
from executor_client._core.approvals import WaitingApprovals
from executor_client._core.arguments import checks_calls
from executor_client._core.endpoint import TlsConfig
from executor_client._core.limits import (
    BUSY_TIMEOUT_S,
    CALL_TIMEOUT_S,
    CLOSE_TIMEOUT_S,
    IMAGE_TIMEOUT_S,
    MAX_CONCURRENT_TOOLS,
    NAME_RACES_MAX,
    RECONNECT_TIMEOUT_S,
    RECORDING_TIME_S,
    TAKE_BACK_WAIT_S,
)
from executor_client._core.local import LocalPath
from executor_client._core.local_daemon import LocalDaemon
from executor_client._core.requests import LimitsLike
from executor_client._core.short_repr import ShortRepr
from executor_client._core.transport_base import Timeouts
from executor_client._core.waiting import Awaited
from executor_client._sync import ClientLease
from executor_client.aio_session import AsyncSession
from executor_client.approvals import Approval, ApprovalDecision, OnApproval
from executor_client.errors import (
    ExecutorClientError,
    NotFoundError,
    PolicyViolationError,
    PreconditionError,
)
from executor_client.results import EnvironmentInfo, Policy, RecordingInfo, SessionInfo, SessionState
from executor_client.waits import OnWait, WaitKind


@checks_calls
class AsyncExecutorClient(ShortRepr):
    """A connection to a daemon, opened on first use. It belongs to the event loop of its first call, and so do its
    sessions.

    `address` is a gRPC target ("host:port", "unix:PATH"). It defaults to $EXECUTOR_ADDRESS, then to this user's local
    daemon. `token` defaults to $EXECUTOR_TOKEN, then to the local daemon's token file. No token is needed if the daemon
    identifies the caller by the certificate of a TlsConfig or by the user of a Unix socket.

    `on_approval` decides requests of this client's sessions that the policy leaves to a person (docs/approvals.md): it
    gets an `Approval` and returns "once", "session" or "deny". It runs in a thread of its own, one call at a time; a
    coroutine function runs on the client's event loop. If it fails, the request is denied and the error logged.

    Timeouts, in seconds:

    - `connect_timeout_s`: wait for a daemon that has never answered. Default: 5, or 0 if it is certain that no daemon
      is there or that these settings can't reach it.
    - `reconnect_timeout_s`: wait for a daemon that stopped answering.
    - `busy_timeout_s`: wait for a daemon without capacity that names a time to retry. 0: no wait.
    - `image_timeout_s`: wait while the daemon fetches a session's image or builds its packages. 0: no wait.
    - `call_timeout_s`: limit of each call except `execute`.

    `on_wait` is called with each `Wait` that lasts longer than a second, and repeatedly while it lasts, on the client's
    event loop; it must not be a coroutine function. It must not block. Its exceptions are logged.

    The client owns the sessions that it creates, unless they are detached. They end when the client is closed, when the
    interpreter exits, when no object refers to them any more, and `owner_grace_s` (a limit) after the process was
    killed or lost the daemon. If another client found the session by `get_session`, it lives as long as that client.

    A session of a fleet is reported LOST within five seconds after its node ended. If the front died with the node, it
    is reported 14 seconds after the front is back.

    Raises ConfigurationError.
    """

    _shows = ("address",)

    def __init__(
        self,
        address: str | None = None,
        *,
        token: str | None = None,
        tls: TlsConfig | bool | None = None,
        connect_timeout_s: float | None = None,
        call_timeout_s: float = CALL_TIMEOUT_S,
        reconnect_timeout_s: float = RECONNECT_TIMEOUT_S,
        busy_timeout_s: float = BUSY_TIMEOUT_S,
        image_timeout_s: float = IMAGE_TIMEOUT_S,
        max_concurrent_tools: int = MAX_CONCURRENT_TOOLS,
        on_wait: OnWait | None = None,
        on_approval: OnApproval | None = None,
    ) -> None:
        timeouts = Timeouts(
            connect_s=connect_timeout_s,
            call_s=call_timeout_s,
            reconnect_s=reconnect_timeout_s,
            busy_s=busy_timeout_s,
            image_s=image_timeout_s,
        )
        self._transport = AsyncTransport(endpoint.resolve(address, token, tls), timeouts, on_wait)
        self._max_concurrent_tools = max_concurrent_tools
        self._on_approval = on_approval
        self._daemon: LocalDaemon | None = None
        self._lease = self._new_lease()

    @classmethod
    async def local(
        cls,
        *,
        backend: str | None = None,
        config: LocalPath | None = None,
        policy: LocalPath | None = None,
        **options: Any,
    ) -> Self:
        """Starts a daemon for this process and returns a client of it. The daemon ends when the client is closed or
        collected, and when this process ends, even by a kill.

        Needs the extra `server`. `config` and `policy` are paths of the daemon's files; `options` are arguments of the
        client. Raises ConfigurationError if the daemon does not start.
        """
        daemon = await run_blocking(LocalDaemon, backend, config, policy)
        try:
            client = cls(daemon.address, token=daemon.token, **options)
        except BaseException:
            daemon.close()
            raise
        client._daemon = daemon
        return client

    @property
    def address(self) -> str:
        return self._transport.endpoint.address

    async def create_session(
        self,
        image: str | None = None,
        authorized_imports: Iterable[str] = (),
        limits: LimitsLike = None,
        labels: Mapping[str, str] | None = None,
        prelude: str = "",
        *,
        backend: str | None = None,
        network: Iterable[str] = (),
        packages: Iterable[str] = (),
        modules: Iterable[str] = (),
        node_labels: Mapping[str, str] | None = None,
        state: bytes | None = None,
        detached: bool = False,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> AsyncSession:
        """Creates a session. Raises PolicyViolationError if the request exceeds the policy.

        `network` names hosts to reach in addition to the policy's default hosts: `"pypi.org"` (ports 443 and 80),
        `"*.example.com:443"`. In a fleet, the session's node has all `node_labels`.
        `packages` are requirements, such as `"scikit-learn>=1.5"`, in addition to the image's packages. The call waits
        for their environment and raises EnvironmentFailed if it can't be built. The policy may add packages for
        authorized modules and for `modules`, the modules that the session's tools need.

        `state` is a result of `AsyncSession.export_state`; `AsyncSession.restored` describes what was restored. Raises
        InvalidRequest for bytes that are not a state, AuthorizationError for the state of another daemon or tenant.

        `name` is unique among the caller's sessions; raises PreconditionError (NAME_TAKEN) if it is in use. `env` has
        environment variables for the session's interpreters and processes; their values are never logged. Raises
        InvalidRequest for variables that Python refuses. A `detached` session outlives this client. Any other
        session ends with the client, or when its `AsyncSession` is collected.
        """
        lease = await self._answering_lease()
        request = requests.create_session(
            image=image,
            authorized_imports=list(authorized_imports),
            limits=limits,
            labels=labels,
            prelude=prelude,
            backend=backend,
            network=list(network),
            packages=list(packages),
            modules=list(modules),
            node_labels=node_labels,
            name=name,
            env=env,
            lease_id="" if detached else lease.lease_id,
        )
        beginning = requests.state_of(state)
        session = await self._made(lease, request)
        if beginning is not None:
            try:
                await session._begin_with(beginning)
            except BaseException:
                with contextlib.suppress(ExecutorClientError):
                    await session.close()
                raise
        return session

    async def _made(self, lease: ClientLease, request: pb.CreateSessionRequest) -> AsyncSession:
        """Creates a session. On failure, ends a session that the daemon may have created."""
        is_made = False
        try:
            awaited = requests.sandbox(request)
            with lease.creating(request.request_id):
                response = await self._transport.call(request, awaited)
            is_made = True
            session = self._session(lease, convert.session_from_wire(response.session), made=True)
            session._prelude = request.prelude
            missing_modules.warn(session.info, request.authorized_imports)
        except BaseException as error:
            if is_made or requests.may_be_made(error, heard=self._transport.answered):
                with contextlib.suppress(TimeoutError):
                    await shielded(lambda: wait_for(lease.take_back(request.request_id), TAKE_BACK_WAIT_S))
            raise
        return session

    async def prepare_environment(
        self, packages: Iterable[str], image: str | None = None, *, backend: str | None = None, ask: bool = True
    ) -> EnvironmentInfo:
        """Makes the daemon build the environment for sessions with these packages, and waits for it.

        Creates no session. The wait ends after `image_timeout_s`, but the build continues; a repeated call waits for
        the same environment. Raises PolicyViolationError as `create_session` does, and EnvironmentFailed, with the
        reason, if no environment can be built from these packages.

        With `ask`, the call waits for the approval of packages that need one; a session with them needs another
        approval. Without `ask`, such packages are refused.
        """
        request = requests.made(pb.PrepareEnvironmentRequest, packages=list(packages), image=image, backend=backend)
        awaited = Awaited(WaitKind.SANDBOX, "an environment")
        try:
            response = await self._transport.call(request, awaited)
        except PolicyViolationError as refusal:
            if not (ask and requests.asks_for_packages(refusal)):
                raise
            request.request_id = requests.new_request_id()
            lease = await self._answering_lease()
            with lease.creating(request.request_id):
                response = await self._transport.call(request, awaited)
        return convert.from_wire(EnvironmentInfo, response)

    async def session(self, name: str, **arguments: Any) -> AsyncSession:
        """Returns the caller's session of this name, or creates it with these arguments of `create_session`.

        A created session is detached: it outlives this client. An existing session is returned unchanged, whatever the
        arguments are. A lost session is replaced.
        """
        for _ in range(NAME_RACES_MAX):
            with contextlib.suppress(NotFoundError):
                found = await self.get_session(name=name)
                if found.info.state is not SessionState.LOST:
                    return found
            try:
                return await self.create_session(**{**arguments, "name": name, "detached": True})
            except PreconditionError as error:
                if error.reason != "NAME_TAKEN":  # else another client was faster
                    raise
        raise PreconditionError(f"other clients keep creating and ending session {name!r}", reason="NAME_TAKEN")

    async def get_session(self, session_id: str | None = None, *, name: str | None = None) -> AsyncSession:
        """Returns an existing session by its id or name. Another process may have created it. Host tools must be
        registered again.

        Unless the session is detached, this client now holds it too, so it outlives the client that created it.
        """
        lease = await self._answering_lease()
        request = requests.get_session(session_id, name, lease.lease_id)
        response = await self._transport.call(request)
        return self._session(lease, convert.session_from_wire(response.session), made=False)

    async def list_sessions(self) -> list[SessionInfo]:
        """Lists the caller's own sessions."""
        response = await self._transport.call(pb.ListSessionsRequest())
        return [convert.session_from_wire(each) for each in response.sessions]

    async def list_recordings(self) -> list[RecordingInfo]:
        """Lists the recordings that the daemon made of the caller's sessions, the oldest first.

        An administrator gets those of all tenants.
        """
        response = await self._transport.call(pb.ListRecordingsRequest())
        return [convert.from_wire(RecordingInfo, each) for each in response.recordings]

    async def get_recording(self, session_id: str, local_path: LocalPath) -> None:
        """Gets the recording of a running or ended session, as a file for `Recording` and `executor replay`.

        Replaces the local file of that name. Raises NotFoundError, PolicyViolationError (the policy does not let the
        tenant fetch it), and OSError.
        """
        from executor_client._core.fetched_recording import FetchedRecording

        with FetchedRecording(local_path) as recording:
            request = requests.made(pb.GetRecordingRequest, session_id=session_id)
            async with aclosing(self._transport.read(request, RECORDING_TIME_S)) as parts:
                async for part in parts:
                    await on_disk(recording.take, part)
            await on_disk(recording.commit)

    async def get_policy(self) -> Policy:
        """Returns the policy for this caller."""
        response = await self._transport.call(pb.GetPolicyRequest())
        return convert.from_wire(Policy, response.policy)

    async def watch_approvals(self) -> AsyncGenerator[tuple[Approval, ...]]:
        """Yields the waiting requests that this client may decide, the oldest first: now, and again after changes.

        While the lists are read, requests wait for this client. An admin may decide for every tenant, an approver for
        its own. Raises AuthorizationError without these rights, and UnavailableError if the stream breaks off: watch
        again.
        """
        waiting = WaitingApprovals()
        async with aclosing(self._transport.read(admin_pb.WatchApprovalsRequest(), math.inf)) as lists:
            async for listed in lists:
                yield waiting.update(listed)

    async def decide_approval(self, approval_id: str, decision: ApprovalDecision) -> None:
        """Decides a waiting request: "once", "session" (equal requests of the session too) or "deny".

        Raises NotFoundError if it was decided or withdrawn, has timed out, or is not this client's to decide.
        """
        await self._transport.call(approvals.decision(approval_id, decision))

    async def close(self) -> None:
        """Ends the sessions that only this client holds, and closes the connection. Idempotent.

        Waits at most 10 seconds for the daemon, which ends the sessions by itself after their `owner_grace_s`.
        """
        self._transport.channel.check_caller()
        await shielded(self._close, CLOSE_TIMEOUT_S)

    async def _close(self) -> None:
        with contextlib.suppress(TimeoutError):
            await wait_for(self._lease.end(), CLOSE_TIMEOUT_S)
        if self._lease.approvals is not None:
            await run_blocking(self._lease.approvals.close)
        await self._transport.close()
        if self._daemon is not None:
            await run_blocking(self._daemon.close)

    def _new_lease(self) -> ClientLease:
        answers = self._on_approval is not None
        return ClientLease(self._transport.endpoint, self._transport.timeouts, answers=answers)

    def _own_lease(self) -> ClientLease:
        """Returns the lease of this process. A forked child gets its own, so it never ends a session of its parent."""
        if self._lease.is_foreign:
            self._lease = self._new_lease()
        return self._lease

    async def _answering_lease(self) -> ClientLease:
        """Returns the lease of this process, connected as an approver if the client has an `on_approval`."""
        lease = self._own_lease()
        if self._on_approval is not None and lease.approvals is not None:
            await run_blocking(lease.approvals.begin, off_loop(self._on_approval))
        return lease

    def _session(self, lease: ClientLease, info: SessionInfo, *, made: bool) -> AsyncSession:
        session = AsyncSession(self._transport, info, lease, max_concurrent_tools=self._max_concurrent_tools)
        session._was_used = not made
        lease.hold(session, info, made=made)
        return session

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()
