"""The composition root: builds the daemon from its configuration, runs it, and takes it down in order.

Everything that is acquired is on one exit stack, so that it is taken down in the opposite order: sessions, calls, the
pool, the backend, and at the very end the state directory's lock. The first signal drains; a second one hurries.
"""

from __future__ import annotations

import asyncio
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager
from functools import partial
from importlib.metadata import version

import structlog
import uvloop

from executor_server import logs, state_dir
from executor_server.admission import STOPPED_TEXT, Admission, must_stop
from executor_server.app_settings import (
    audit_files,
    audit_settings,
    backend_of,
    capacity_of,
    policy_of,
    pool_settings,
    server_settings,
    session_settings,
)
from executor_server.audit import AuditLog
from executor_server.audit_trail import AuditTrail
from executor_server.backend_set import BackendSet
from executor_server.backends.base import Backend, HostFinding
from executor_server.config import Config
from executor_server.cpu_shares import CpuShares
from executor_server.fair_queue import FairQueue
from executor_server.host_sweeper import HostSweeper
from executor_server.metrics import Metrics
from executor_server.metrics_endpoint import MetricsEndpoint
from executor_server.metrics_sources import Sources, SourcesCollector
from executor_server.model import Principal
from executor_server.observer import Observers
from executor_server.policies import PolicyListener, PolicyStore
from executor_server.policy import Policy
from executor_server.pool import WarmPool
from executor_server.quotas import Quotas
from executor_server.registry import Registry
from executor_server.rpc.admin import AdminService
from executor_server.rpc.handlers import OWN_METHODS
from executor_server.rpc.identities import Identities
from executor_server.rpc.meter import metering
from executor_server.rpc.server import RpcServer
from executor_server.rpc.service import ExecutorService
from executor_server.rpc.tracing import call_tracing, load_tracing
from executor_server.sessions import SessionManager, Watch
from executor_server.settings import ConfigError
from executor_server.state_archive import StateArchives
from executor_server.timed_gate import TimedGate
from executor_server.token_file import TokenFile, TokenFileError
from executor_server.tokens import Tokens
from executor_server.usage_store import UsageStore

VERSION = version("remote-executor")
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
    return uvloop.run(backend_of(config).check_host())


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
    settings = server_settings(config)
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(_signals())
        own_state = stack.enter_context(state_dir.claim(config.server.state_dir))
        tokens = Tokens(
            state_dir.read_or_make_token(own_state), TokenFile(config.server.token_file or own_state.tokens_path)
        )
        registry = stack.enter_context(closing(Registry(own_state)))
        key = state_dir.read_or_make_state_key(own_state, config.state.key_file)
        states = StateArchives(own_state.states_path, key)

        backend = backend_of(config)
        stack.push_async_callback(backend.close)
        await backend.start()

        # Who watches. Quotas and the audit log are asked before something happens, the others told after it has.
        metrics = (
            Metrics(version=VERSION, backend=backend.name, methods=OWN_METHODS)
            if config.metrics.listen is not None
            else None
        )
        log = AuditLog(audit_files(config), audit_settings(config)) if config.audit.enabled else None
        trail = AuditTrail(log) if log is not None else None
        news = _PolicyNews([each for each in (trail, metrics) if each is not None])
        policies = PolicyStore(config.policy.file, partial(policy_of, config), config.policy.watch_interval_s, news)
        usage = stack.enter_context(closing(UsageStore(own_state.usage_path)))
        capacity = capacity_of(config, lambda: policies.current, tokens)
        quotas = stack.enter_context(
            closing(Quotas(lambda tenant: policies.current.quotas_of(tenant), usage, capacity=capacity))
        )
        if log is not None and trail is not None:
            stack.push_async_callback(log.close)
            await log.start()
            tokens.listen(trail.tokens_changed)
            trail.daemon_started(
                version=VERSION,
                backend=backend.name,
                policy=policies.current.fingerprint,
                policy_version=policies.current.version,
            )
        tracing = load_tracing(config.tracing, VERSION)
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        shares = stack.enter_context(closing(CpuShares(lambda session, share: sessions.set_cpu_share(session, share))))
        observer = Observers([each for each in (quotas, trail, metrics, tracing, shares) if each is not None])
        admission = Admission(quotas, FairQueue(config.sessions.creations), log)
        gate = admission if metrics is None else TimedGate(admission, metrics)

        pool = WarmPool(backend, pool_settings(config))
        stack.push_async_callback(pool.close)
        sessions = SessionManager(backend, pool, registry, session_settings(config), Watch(gate, observer))

        def follow(policy: Policy) -> None:
            # First the pool: from here on nobody gets a sandbox that the earlier policy approved.
            pool.keep_ready(policy.warm_sandboxes(config.pool))
            sessions.follow(policy)

        news.on_change(follow)
        if log is not None:
            log.on_failing(lambda: sessions.stop_executions(must_stop, STOPPED_TEXT))
        around = [] if tracing is None else [call_tracing(tracing)]
        around += [] if metrics is None else [metering(metrics)]
        admin = AdminService(
            sessions,
            quotas,
            lambda: policies.current,
            partial(_reload, policies, tokens),
            _record_nothing if trail is None else trail.admin_called,
        )
        server = RpcServer(
            ExecutorService(lambda: policies.current, sessions, states),
            Identities(tokens, lambda: policies.current),
            settings,
            admin=admin,
            observer=observer,
            quotas=quotas,
            interceptors=around,
        )
        if trail is not None:
            stack.callback(trail.daemon_stopped)
        # The sessions end before the server does: what still runs ends as cancelled, and its callers are told so.
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.push_async_callback(sessions.close)
        # Recovered sessions end with this daemon, so all that can be wrong with its configuration comes before them.
        server.bind()
        for problem in server.unserved:
            _log.warning("address_not_served", problem=problem)
        if metrics is not None and config.metrics.listen is not None:
            metrics.registry.register(
                SourcesCollector(metrics, _sources(sessions, pool, policies, quotas, log, backend))
            )
            endpoint = MetricsEndpoint(metrics, config.metrics.listen)
            stack.push_async_callback(endpoint.close)
            await endpoint.start()
        # And this before anything makes a sandbox: what no session of an earlier daemon owns is destroyed here.
        await sessions.recover()
        sessions.follow(policies.current)
        pool.keep_ready(policies.current.warm_sandboxes(config.pool))
        await sessions.start()
        sweeper = HostSweeper(backend, config.sessions.host_sweep_interval_s)
        stack.push_async_callback(sweeper.close)
        await sweeper.start()
        stack.push_async_callback(policies.close)
        await policies.start()
        signals.on_reload(policies.reload_soon)
        listening = await server.start()
        _announce(listening, own_state)

        await signals.first()
        _log.info("daemon_draining", drain_s=config.sessions.drain_s)
        await server.announce_end()
        await _unless_hurried(signals, sessions, config.sessions.drain_s)
        _log.info("daemon_stopping")


class _PolicyNews(PolicyListener):
    """Brings another policy to whom it concerns, and all news of policies to who counts them and writes them down."""

    def __init__(self, told: Sequence[PolicyListener]) -> None:
        self._told = told
        self._follow: Callable[[Policy], None] | None = None

    def on_change(self, follow: Callable[[Policy], None]) -> None:
        """What has to follow another policy, before the store begins to watch."""
        self._follow = follow

    def policy_changed(self, before: Policy, now: Policy) -> None:
        for each in self._told:
            each.policy_changed(before, now)
        if self._follow is not None:
            self._follow(now)

    def policy_unchanged(self) -> None:
        for each in self._told:
            each.policy_unchanged()

    def policy_refused(self, current: Policy, problems: Sequence[str]) -> None:
        for each in self._told:
            each.policy_refused(current, problems)


async def _reload(policies: PolicyStore, tokens: Tokens) -> bool:
    """Reads policy and tokens again; whether the policy is another one. Raises ConfigError."""
    try:
        await tokens.reload()
    except TokenFileError as error:
        raise ConfigError([str(error)]) from error
    return await policies.reload()


def _record_nothing(_principal: Principal, _method: str, _target: str) -> None:
    """There is no audit log."""


def _sources(
    sessions: SessionManager,
    pool: WarmPool,
    policies: PolicyStore,
    quotas: Quotas,
    log: AuditLog | None,
    backend: Backend,
) -> Sources:
    return Sources(
        sessions=sessions.list_all,
        pool=pool.stats,
        policy=lambda: policies.current,
        quotas=quotas,
        audit=log.stats if log is not None else None,
        backends=backend.states if isinstance(backend, BackendSet) else dict,
    )


async def _unless_hurried(signals: Signals, sessions: SessionManager, drain_s: float) -> None:
    """Drains the sessions; a second signal breaks it off."""
    drain = asyncio.create_task(sessions.drain(drain_s))
    hurry = asyncio.create_task(signals.second())
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


class Signals:
    """Counts the requests to stop, and passes on those to reload."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()
        self._reload: Callable[[], None] | None = None

    def on_reload(self, reload: Callable[[], None]) -> None:
        """What SIGHUP asks for; before, it is heard and nothing is done."""
        self._reload = reload

    def reload_asked(self) -> None:
        if self._reload is not None:
            self._reload()

    def received(self) -> None:
        if self._first.is_set():
            self._second.set()
        self._first.set()

    async def first(self) -> None:
        await self._first.wait()

    async def second(self) -> None:
        await self._second.wait()


@contextmanager
def _signals() -> Iterator[Signals]:
    loop = asyncio.get_running_loop()
    signals = Signals()
    handlers = {
        signal.SIGTERM: signals.received,
        signal.SIGINT: signals.received,
        signal.SIGHUP: signals.reload_asked,
    }
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield signals
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


def _announce(listening: Sequence[str], own_state: state_dir.StateDir) -> None:
    # For people and for whoever started us and waits: the sockets accept calls from here on.
    sys.stdout.write(f"executor-server listens on {' and '.join(listening)}; the token is in {own_state.token_path}\n")
    sys.stdout.flush()
    _log.info("daemon_listening", addresses=list(listening))
