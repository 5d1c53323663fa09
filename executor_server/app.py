"""The composition root: builds the daemon from its configuration, runs it, and takes it down in order.

Everything that is acquired is on one exit stack, so that it is taken down in the opposite order: sessions, calls, the
pool, the backend, and at the very end the state directory's lock. The first signal drains; a second one hurries.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager

import structlog
import uvloop

from executor_server import logs, state_dir
from executor_server.backends.base import Backend, HostFinding
from executor_server.backends.local import LocalBackend
from executor_server.config import Config, ServerSection
from executor_server.host_sweeper import HostSweeper
from executor_server.policy import Policy
from executor_server.policy_file import load_policy
from executor_server.pool import PoolSettings, WarmPool
from executor_server.registry import Registry
from executor_server.rpc.addresses import judged, unix_address
from executor_server.rpc.identities import Identities
from executor_server.rpc.peer_socket import PeerSocket
from executor_server.rpc.server import RpcServer, ServerSettings, TlsFiles
from executor_server.rpc.service import ExecutorService
from executor_server.sessions import SessionManager, SessionSettings
from executor_server.token_file import TokenFile
from executor_server.tokens import Tokens

# When the sessions have ended, calls only have to deliver what is already there.
STOP_GRACE_S = 2.0
# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_log = structlog.get_logger(__name__)


def serve(config: Config) -> None:
    """Runs the daemon until it is told to stop. Raises ConfigError, StateDirError, AddressError, SandboxFailure."""
    logs.configure(config.log.level, config.log.format)
    _keep_freed_memory()
    uvloop.run(_serve(config))


def check_host(config: Config) -> Sequence[HostFinding]:
    """What this host can isolate and limit."""
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(_make_backend(config).check_host())


def _keep_freed_memory() -> None:
    """Has the allocator keep what is freed, up to a bound, instead of giving it back after every large message.

    Values pass through in messages of 256 KiB. glibc maps and unmaps each by itself, and clearing the pages anew costs
    more than all the copying (505 µs against 20 µs for one message, measured). Other C libraries have no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)
        mallopt(_M_TRIM_THRESHOLD, 64 * 1024 * 1024)


async def _serve(config: Config) -> None:
    server_settings = _server_settings(config)
    async with AsyncExitStack() as stack:
        stop = stack.enter_context(_stop_signals())
        own_state = stack.enter_context(state_dir.claim(config.server.state_dir))
        token_file = TokenFile(config.server.token_file or own_state.tokens_path)
        tokens = Tokens(state_dir.read_or_make_token(own_state), token_file)

        registry = stack.enter_context(closing(Registry(own_state)))

        backend = _make_backend(config)
        stack.push_async_callback(backend.close)
        await backend.start()
        policy = _make_policy(config, backend)
        warm = policy.warm_sandboxes(config.pool)

        pool = WarmPool(backend, _pool_settings(config))
        stack.push_async_callback(pool.close)
        sessions = SessionManager(backend, pool, registry, _session_settings(config))
        identities = Identities(tokens, lambda: policy)
        server = RpcServer(ExecutorService(policy, sessions), identities, server_settings)
        # The sessions end before the server does: what still runs ends as cancelled, and its callers are told so.
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.push_async_callback(sessions.close)
        # Recovered sessions end with this daemon, so all that can be wrong with its configuration comes before them.
        server.bind()
        # And this before anything makes a sandbox: what no session of an earlier daemon owns is destroyed here.
        await sessions.recover()
        await pool.start(warm)
        await sessions.start()
        sweeper = HostSweeper(backend, config.sessions.host_sweep_interval_s)
        stack.push_async_callback(sweeper.close)
        await sweeper.start()
        listening = await server.start()
        _announce(listening, own_state)

        await stop.first()
        _log.info("daemon_draining", drain_s=config.sessions.drain_s)
        await server.announce_end()
        await _unless_hurried(stop, sessions, config.sessions.drain_s)
        _log.info("daemon_stopping")


async def _unless_hurried(stop: StopSignals, sessions: SessionManager, drain_s: float) -> None:
    """Drains the sessions; a second signal breaks it off."""
    drain = asyncio.create_task(sessions.drain(drain_s))
    hurry = asyncio.create_task(stop.second())
    try:
        await asyncio.wait((drain, hurry), return_when=asyncio.FIRST_COMPLETED)
        if not drain.done():
            _log.warning("daemon_hurried")
    finally:
        drain.cancel()
        hurry.cancel()
        await asyncio.wait((drain, hurry))
    if not drain.cancelled():
        drain.result()


class StopSignals:
    """Counts the requests to stop."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    def received(self) -> None:
        if self._first.is_set():
            self._second.set()
        self._first.set()

    async def first(self) -> None:
        await self._first.wait()

    async def second(self) -> None:
        await self._second.wait()


@contextmanager
def _stop_signals() -> Iterator[StopSignals]:
    loop = asyncio.get_running_loop()
    stop = StopSignals()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.received)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _announce(listening: Sequence[str], own_state: state_dir.StateDir) -> None:
    # For people and for whoever started us and waits: the sockets accept calls from here on.
    sys.stdout.write(f"executor-server listens on {' and '.join(listening)}; the token is in {own_state.token_path}\n")
    sys.stdout.flush()
    _log.info("daemon_listening", addresses=list(listening))


# ---------------------------------------------------------------------------------------------------------------------
# From the configuration to the parts' settings


def _make_backend(config: Config) -> Backend:
    if config.server.backend == "docker":
        # Imported here: nobody else pays for the SDK's imports.
        from executor_server.backends.docker import DockerBackend

        return DockerBackend(config.server.state_dir, config.docker)
    return LocalBackend(config.server.state_dir, config.local.images, bwrap=config.local.bwrap)


def _make_policy(config: Config, backend: Backend) -> Policy:
    return Policy(
        load_policy(config.policy.file),
        images=backend.images,
        backend=backend.name,
        orphan_time_s=config.sessions.orphan_time_s,
    )


def _pool_settings(config: Config) -> PoolSettings:
    pool = config.pool
    return PoolSettings(
        concurrency=pool.concurrency,
        backoff_s=pool.backoff_s,
        max_backoff_s=pool.max_backoff_s,
        ping_interval_s=config.sessions.ping_interval_s,
    )


def _session_settings(config: Config) -> SessionSettings:
    sessions = config.sessions
    return SessionSettings(
        max_sessions=sessions.max_sessions,
        max_queued_executions=sessions.max_queued_executions,
        max_finished_executions=sessions.max_finished_executions,
        journal_bytes=sessions.journal_bytes,
        staging_bytes=sessions.staging_bytes,
        max_file_bytes=sessions.max_file_bytes,
        sweep_interval_s=sessions.sweep_interval_s,
        ping_interval_s=sessions.ping_interval_s,
        silence_s=sessions.silence_s,
        recovery_s=sessions.recovery_s,
    )


def _server_settings(config: Config) -> ServerSettings:
    server = config.server
    tls = None
    if server.tls_cert is not None and server.tls_key is not None:
        tls = TlsFiles(cert=server.tls_cert, key=server.tls_key, client_ca=server.tls_client_ca)
    return ServerSettings(
        listen=judged(config.listen_addresses, has_tls=tls is not None),
        tls=tls,
        max_message_bytes=server.max_message_bytes,
        max_metadata_bytes=server.max_metadata_bytes,
        max_concurrent_streams=server.max_concurrent_streams,
        max_concurrent_calls=server.max_concurrent_calls,
        connection_idle_s=server.connection_idle_s,
        keepalive_s=server.keepalive_s,
        keepalive_timeout_s=server.keepalive_timeout_s,
        peer_socket=_peer_socket(server),
    )


def _peer_socket(server: ServerSection) -> PeerSocket | None:
    if server.peer_socket is None:
        return None
    inner = state_dir.StateDir(server.state_dir).inner_socket_path
    return PeerSocket(outer=unix_address(server.peer_socket), inner=unix_address(inner))
