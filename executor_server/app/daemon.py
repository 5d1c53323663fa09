"""Builds the daemon from its configuration, runs it, and shuts it down in order.

Everything that is acquired is on one exit stack, which releases it in the opposite order: sessions, calls, the pool,
the backend, and last the lock of the state directory. The first signal drains the sessions; a second one hurries.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import structlog
import uvloop

from executor_server.admission import STOPPED_TEXT, Admission, Quotas, UsageStore, must_stop
from executor_server.app.egress import EgressOwner
from executor_server.app.environments import EnvironmentOwner
from executor_server.app.helper_workshops import packages_finding
from executor_server.app.settings import (
    backends_of,
    capacity_of,
    joined,
    policy_of,
    pool_settings,
    server_settings,
    session_settings,
)
from executor_server.app.signals import Signals, handled_signals
from executor_server.app.watchers import PolicyListeners, Watchers
from executor_server.backends import Backend, HostFinding, HostSweeper
from executor_server.config import BackendName, Config, ConfigError, StateDir, state_dir
from executor_server.core import Principal, logs
from executor_server.fairness import CpuShares, FairSemaphore
from executor_server.identity import Identities, TokenFile, TokenFileError, Tokens
from executor_server.journal import Registry
from executor_server.lifecycle import AdmissionController, Observer, Observers
from executor_server.policy import Policy, PolicyStore
from executor_server.pool import BackendSet, WarmPool
from executor_server.rpc import AdminService, ExecutorService, RpcServer, ServerSettings
from executor_server.sessions import SessionHooks, SessionManager, StateArchives
from executor_server.telemetry import Sources, TimedAdmission

VERSION = version("remote-executor")
# Seconds for calls to deliver what is already there, after the sessions have ended.
STOP_GRACE_S = 2.0
# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_log = structlog.get_logger(__name__)


def serve(config: Config) -> None:
    """Runs the daemon until a signal stops it. Raises ConfigError, StateDirError, AddressError, SandboxFailure."""
    logs.configure(config.log.level, config.log.format)
    _keep_freed_memory()
    uvloop.run(_serve(config))


def check_host(config: Config, backend: BackendName) -> Sequence[HostFinding]:
    """Returns what this host can isolate and limit with one of the backends."""
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(_check_host(config, backend))


async def _check_host(config: Config, backend: BackendName) -> Sequence[HostFinding]:
    alone = config.alone(backend)
    findings = [*await joined(alone, backends_of(alone)).check_host()]
    if backend == "e2b" and "local" not in config.server.backends:
        findings.append(await packages_finding(config))
    return findings


def _keep_freed_memory() -> None:
    """Makes the allocator keep freed memory, up to a bound, instead of returning it after every large message.

    Values pass through in messages of 256 KiB. glibc maps and unmaps each separately, and clearing the pages again
    costs more than all the copying (505 µs against 20 µs for one message, measured). Other C libraries have no mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 1024 * 1024)
        mallopt(_M_TRIM_THRESHOLD, 64 * 1024 * 1024)


async def _serve(config: Config) -> None:
    """Starts up, runs until a signal asks for the end, and shuts down: leaving the stack releases everything."""
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(handled_signals())
        daemon = await _start_up(config, stack)
        signals.on_reload(daemon.reload_soon)
        _announce(await daemon.server.start(), daemon.own_state)

        await signals.first()
        _log.info("daemon_draining", drain_s=config.sessions.drain_s)
        await daemon.server.announce_end()
        await _drain_unless_hurried(signals, daemon.sessions, config.sessions.drain_s)
        _log.info("daemon_stopping")


@dataclass(frozen=True)
class _Daemon:
    """The parts that the running daemon still speaks to."""

    own_state: StateDir
    policies: PolicyStore
    egress: EgressOwner
    sessions: SessionManager
    server: RpcServer

    def reload_soon(self) -> None:
        self.policies.reload_soon()
        self.egress.reload_soon()


@dataclass(frozen=True)
class _Control:
    """The parts that say who may do what, and who watches it."""

    tokens: Tokens
    policies: PolicyStore
    listeners: PolicyListeners
    quotas: Quotas
    watchers: Watchers


async def _start_up(config: Config, stack: AsyncExitStack) -> _Daemon:
    """Builds and starts the parts from the bottom up.

    Sessions of an earlier daemon end with this one, so all that can be wrong with the configuration is found before
    they are recovered: reading it, the tokens, the backend's host, the audit log, the addresses.
    """
    settings = server_settings(config)
    own_state = stack.enter_context(state_dir.claim(config.server.state_dir))
    token_file = TokenFile(config.server.token_file or own_state.tokens_path)
    tokens = Tokens(state_dir.read_or_make_token(own_state), token_file)
    registry = stack.enter_context(closing(Registry(own_state)))
    archives = StateArchives(own_state.states_path, state_dir.read_or_make_state_key(own_state, config.state.key_file))
    egress = EgressOwner(config, own_state)
    stack.push_async_callback(egress.close)
    await egress.start()
    environments = EnvironmentOwner(config)
    backend = await _start_backends(config, stack, egress, environments)

    control = await _start_control(config, stack, own_state, tokens, backend.name)
    await environments.start(control.watchers.environment_observers())
    watchers, policies, quotas = control.watchers, control.policies, control.quotas
    shares = stack.enter_context(closing(CpuShares(lambda session, share: sessions.set_cpu_share(session, share))))
    watching = (quotas, watchers.trail, watchers.connections, watchers.metrics, watchers.tracing, shares)
    observer = Observers([each for each in watching if each is not None])
    admission: AdmissionController = Admission(quotas, FairSemaphore(config.sessions.creations), watchers.log)
    if watchers.metrics is not None:
        admission = TimedAdmission(admission, watchers.metrics)

    pool = WarmPool(backend, pool_settings(config))
    stack.push_async_callback(pool.close)
    hooks = SessionHooks(admission, observer, egress.service, environments.service.held_by)
    sessions = SessionManager(backend, pool, registry, session_settings(config), hooks)
    quotas.on_window_change(sessions.renew_windows)
    if watchers.log is not None:
        watchers.log.on_failing(lambda: sessions.stop_executions(must_stop, STOPPED_TEXT))
    server = _server(control, egress, environments, sessions, archives, observer, settings)
    if watchers.trail is not None:
        stack.callback(watchers.trail.daemon_stopped)
    # The sessions end before the server does: their executions end as cancelled, and the callers still hear of it.
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    stack.push_async_callback(sessions.close)
    server.bind()
    for problem in server.unserved:
        _log.warning("address_not_served", problem=problem)
    sources = _sources(sessions, pool, policies, quotas, watchers, backend, environments)
    await watchers.serve_metrics(stack, config.metrics.listen, sources)

    # Before anything makes a sandbox: recovery destroys every sandbox that no session of an earlier daemon owns.
    await sessions.recover()
    _follow_policy(control, config, egress, pool, sessions)
    await sessions.start()
    sweeper = HostSweeper(backend, config.sessions.host_sweep_interval_s)
    stack.push_async_callback(sweeper.close)
    await sweeper.start()
    stack.push_async_callback(policies.close)
    await policies.start()
    return _Daemon(own_state, policies, egress, sessions, server)


async def _start_backends(
    config: Config, stack: AsyncExitStack, egress: EgressOwner, environments: EnvironmentOwner
) -> Backend:
    """Starts the backends, which act as one. Environments end before them, and give their workshops back."""
    backends = backends_of(config, egress.bundle, lambda: environments.service)
    environments.build_in(backends, egress.service, egress.bundle)
    backend = joined(config, backends)
    stack.push_async_callback(backend.close)
    await backend.start()
    stack.push_async_callback(environments.close)
    return backend


async def _start_control(
    config: Config, stack: AsyncExitStack, own_state: StateDir, tokens: Tokens, backend: str
) -> _Control:
    """Reads the policy, and starts what counts and records its use."""
    watchers = Watchers.build(config, VERSION, backend)
    listeners = PolicyListeners([watchers.trail, watchers.metrics])
    policies = PolicyStore(config.policy.file, partial(policy_of, config), config.policy.watch_interval_s, listeners)
    usage = stack.enter_context(closing(UsageStore(own_state.usage_path)))
    capacity = capacity_of(config, lambda: policies.current, tokens)
    quotas = Quotas(lambda tenant: policies.current.quotas_of(tenant), usage, capacity=capacity)
    stack.enter_context(closing(quotas))
    await watchers.start(stack, tokens, policies.current, VERSION, backend)
    return _Control(tokens, policies, listeners, quotas, watchers)


def _server(
    control: _Control,
    egress: EgressOwner,
    environments: EnvironmentOwner,
    sessions: SessionManager,
    archives: StateArchives,
    observer: Observer,
    settings: ServerSettings,
) -> RpcServer:
    policies, trail = control.policies, control.watchers.trail
    return RpcServer(
        ExecutorService(lambda: policies.current, sessions, archives),
        Identities(control.tokens, lambda: policies.current),
        settings,
        admin=AdminService(
            sessions,
            control.quotas,
            lambda: policies.current,
            partial(_reload, policies, control.tokens, egress),
            _record_nothing if trail is None else trail.admin_called,
            environments.service,
        ),
        observer=observer,
        quotas=control.quotas,
        interceptors=control.watchers.interceptors(),
    )


def _follow_policy(
    control: _Control, config: Config, egress: EgressOwner, pool: WarmPool, sessions: SessionManager
) -> None:
    """Applies the policy in force, now and whenever it is replaced."""

    def follow(policy: Policy) -> None:
        # The pool goes first: from here on no session gets a sandbox that only the earlier policy approved.
        pool.keep_ready(policy.warm_sandboxes(config.pool))
        egress.follow(policy)
        sessions.follow(policy)
        sessions.renew_windows()  # the quotas may be others

    control.listeners.on_change(follow)
    follow(control.policies.current)


async def _reload(policies: PolicyStore, tokens: Tokens, egress: EgressOwner) -> bool:
    """Reads policy, tokens and secrets again. Returns True when the policy changed. Raises ConfigError."""
    try:
        await tokens.reload()
    except TokenFileError as error:
        raise ConfigError([str(error)]) from error
    await egress.reload()
    return await policies.reload()


def _record_nothing(_principal: Principal, _method: str, _target: str) -> None:
    """There is no audit log."""


def _sources(
    sessions: SessionManager,
    pool: WarmPool,
    policies: PolicyStore,
    quotas: Quotas,
    watchers: Watchers,
    backend: Backend,
    environments: EnvironmentOwner,
) -> Sources:
    return Sources(
        sessions=sessions.list_all,
        pool=pool.stats,
        policy=lambda: policies.current,
        quotas=quotas,
        audit=watchers.log.stats if watchers.log is not None else None,
        backends=backend.states if isinstance(backend, BackendSet) else dict,
        environments=environments.service.statistics,
    )


async def _drain_unless_hurried(signals: Signals, sessions: SessionManager, drain_s: float) -> None:
    """Drains the sessions; a second signal ends that."""
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


def _announce(listening: Sequence[str], own_state: StateDir) -> None:
    # For a person, or for a program that started the daemon and waits: the sockets accept calls from here on.
    sys.stdout.write(f"executor-server listens on {' and '.join(listening)}; the token is in {own_state.token_path}\n")
    sys.stdout.flush()
    _log.info("daemon_listening", addresses=list(listening))
