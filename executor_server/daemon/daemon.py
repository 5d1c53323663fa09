"""Builds the daemon from its configuration, runs it, and shuts it down in order.

Everything that is acquired is on one exit stack, which releases it in the opposite order: sessions, calls, the pool,
the backend, and last the lock of the state directory. The first signal drains the sessions; a second one hurries.
"""

from __future__ import annotations

import asyncio
import ctypes
import shutil
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import uvloop

from executor_server.api import (
    AdminService,
    AuditView,
    DaemonStatus,
    EndedSessions,
    ExecutorService,
    PolicyView,
    RpcServer,
    SessionViews,
)
from executor_server.api.assembly.control import Control, read_tokens, start_control
from executor_server.api.assembly.parts import Parts
from executor_server.api.assembly.settings import (
    backends_of,
    joined,
    policy_of,
    pool_settings,
    server_settings,
    session_settings,
)
from executor_server.api.assembly.watchers import Watchers
from executor_server.api.recordings import Recordings
from executor_server.backends import Backend, HostFinding, HostSweeper, open_files
from executor_server.backends.local import ForkServerStats, LocalBackend
from executor_server.core import logs
from executor_server.core.config import BackendName, Config, StateDir, state_dir
from executor_server.core.fairness import CpuShares, FairSemaphore
from executor_server.core.lifecycle import AdmissionController, Observers
from executor_server.core.lifecycle.announcement import announce
from executor_server.core.lifecycle.signals import Signals, handled_signals
from executor_server.daemon.egress_owner import EgressOwner, network_finding
from executor_server.daemon.environment_owner import EnvironmentOwner
from executor_server.daemon.helper_build_sandboxes import packages_finding
from executor_server.policy import Policy, PolicyStore, configured_images
from executor_server.policy.approvals import Approvals
from executor_server.policy.quotas import STOPPED_TEXT, Admission, UsageStore, must_stop
from executor_server.sessions import SessionHooks, SessionIds, SessionManager, StateArchives
from executor_server.sessions.journal import Registry
from executor_server.sessions.pool import BackendSet, WarmPool
from executor_server.telemetry import Sources, TimedAdmission

if TYPE_CHECKING:
    from executor_server.fleet.api.node_server import NodeServer
    from executor_server.fleet.daemons.node import Node

VERSION = version("remote-executor")
# Seconds for calls to deliver what is already there, after the sessions have ended.
STOP_GRACE_S = 2.0
CREATIONS_AT_A_TIME = 4
"""Sandboxes that are created at a time for waiting sessions; tenants take turns."""
HOST_SWEEP_INTERVAL_S = 60.0
# mallopt(3)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_log = structlog.get_logger(__name__)


def serve(config: Config, owner_pid: int | None = None) -> None:
    """Runs the daemon until a signal stops it. Raises ConfigError, StateDirError, AddressError, SandboxFailure.

    With an owner, a parent process, the daemon ends when the owner does, and removes its state directory.
    """
    logs.configure(config.log.level, config.log.format)
    _keep_freed_memory()
    open_files.raise_limit()
    try:
        uvloop.run(_serve(config, owner_pid))
    finally:
        if owner_pid is not None:
            shutil.rmtree(config.server.state_dir, ignore_errors=True)


def check_host(config: Config, backend: BackendName) -> Sequence[HostFinding]:
    """Returns what this host can isolate and limit with one of the backends."""
    logs.configure(config.log.level, config.log.format)
    return uvloop.run(_check_host(config, backend))


async def _check_host(config: Config, backend: BackendName) -> Sequence[HostFinding]:
    alone = config.alone(backend)
    findings = [*await joined(backends_of(alone)).check_host()]
    findings.append(open_files.open_files_finding(config.sessions.max_sessions))
    if backend != "e2b":  # there the proxy is the machine's
        findings.append(await network_finding(config))
    elif "local" not in config.server.backends:
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


async def _serve(config: Config, owner_pid: int | None) -> None:
    """Starts up, runs until a signal asks for the end, and shuts down: leaving the stack releases everything."""
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(handled_signals(owner_pid))
        daemon = await _start_up(config, stack)
        signals.on_reload(daemon.reload_soon)
        announce(await daemon.server.start(), daemon.own_state)

        await signals.first()
        _log.info("daemon_draining", drain_s=config.sessions.drain_s)
        await daemon.server.announce_end()
        await _drain_unless_hurried(signals, daemon.sessions, config.sessions.drain_s)
        _log.info("daemon_stopping")


@dataclass(frozen=True)
class _Daemon:
    """The parts that the running daemon still uses."""

    own_state: StateDir
    policies: PolicyStore
    egress: EgressOwner
    sessions: SessionManager
    server: RpcServer | NodeServer

    def reload_soon(self) -> None:
        self.policies.reload_soon()
        self.egress.reload_soon()


async def _start_up(config: Config, stack: AsyncExitStack) -> _Daemon:
    """Builds and starts the parts from the bottom up.

    Recovered sessions of an earlier daemon would end if this one failed. So everything that can be wrong
    with the configuration is found before: reading it, the tokens, the backend's host, the audit log, the addresses.
    """
    settings = server_settings(config)
    own_state = stack.enter_context(state_dir.claim(config.server.state_dir))
    node = _node(config, own_state)
    config = config if node is None else node.config
    tokens = None if node is not None else read_tokens(config, own_state)
    registry = stack.enter_context(closing(Registry(own_state)))
    archives = StateArchives(own_state.states_path, state_dir.read_or_make_state_key(own_state, config.state.key_file))
    egress = EgressOwner(config, own_state)
    stack.push_async_callback(egress.close)
    await egress.start()
    environments = EnvironmentOwner(config)
    backend = await _start_backends(config, stack, egress, environments)
    control = await start_control(
        config,
        stack,
        tokens,
        partial(policy_of, config),
        version=VERSION,
        backend=backend.name,
        max_sessions=config.sessions.max_sessions,
        usage=stack.enter_context(closing(UsageStore(own_state.usage_path))),
        copies=None if node is None else own_state.node_locks_path,
    )
    await environments.start(control.watchers.environment_observers())
    watchers, policies, quotas = control.watchers, control.policies, control.quotas
    shares = stack.enter_context(closing(CpuShares(lambda session, share: sessions.set_cpu_share(session, share))))
    of_node = [] if node is None else [node.ended]
    ended = stack.enter_context(closing(EndedSessions(own_state.ended_path)))
    views = SessionViews(lambda: sessions.list_all(), ended)
    observer = Observers([quotas, *watchers.observers(), shares, views, *of_node])
    local = _local(backend)
    pool = WarmPool(backend, pool_settings(config), None if local is None else local.keep_fork_servers)
    stack.push_async_callback(pool.close)
    ids = node.ids if node is not None else SessionIds()
    admission = _admission(control)
    approvals = Approvals(watchers.approval_observer())
    stack.callback(approvals.close)
    trail = watchers.trail
    recordings = Recordings(own_state.recordings_path, *(() if trail is None else (trail.recording_fetched,)))
    stack.push_async_callback(recordings.close)
    await recordings.load()
    hooks = SessionHooks(
        admission, observer, egress.service, approvals, environments.service.held_by, ids, recorders=recordings
    )
    sessions = SessionManager(backend, pool, registry, session_settings(config), hooks)
    sessions.on_end(views.session_closed)
    quotas.on_window_change(sessions.renew_windows)
    if watchers.log is not None:
        watchers.log.on_failing(lambda: sessions.stop_executions(must_stop, STOPPED_TEXT))
    status = DaemonStatus(
        version=VERSION,
        start_time_s=time.time(),
        max_sessions=config.sessions.max_sessions,
        images={name: configured_images(config, name) for name in config.server.backends},
        sessions=sessions,
        approvals=approvals,
        policy=lambda: policies.current,
        pool=pool.stats,
        backends=backend.states if isinstance(backend, BackendSet) else dict,
        audit=watchers.log,
    )
    parts = Parts(
        sessions=sessions,
        pool=pool,
        quotas=quotas,
        backend=backend,
        policies=policies,
        archives=archives,
        service=ExecutorService(
            lambda: policies.current,
            sessions,
            archives,
            approvals,
            recordings,
            in_fleet=node is not None,
            why_ended=views.why_ended,
        ),
        admin=_admin(control, egress, environments, sessions, approvals, views, status, config.audit_directory),
        observer=observer,
        settings=settings,
        wrappers=watchers.wrappers(),
    )
    server = _bind(stack, parts, control, node)
    await watchers.serve_metrics(stack, config.metrics.listen, _sources(parts, watchers, environments, recordings))

    # Before anything makes a sandbox: recovery destroys every sandbox that no session of an earlier daemon owns.
    await sessions.recover()
    await recordings.start()
    _follow_policy(control, config, egress, pool, sessions)
    await sessions.start()
    await _start_background(stack, backend, policies)
    return _Daemon(own_state, policies, egress, sessions, server)


def _admission(control: Control) -> AdmissionController:
    watchers = control.watchers
    admission: AdmissionController = Admission(control.quotas, FairSemaphore(CREATIONS_AT_A_TIME), watchers.log)
    if watchers.metrics is not None:
        admission = TimedAdmission(admission, watchers.metrics)
    return admission


async def _start_background(stack: AsyncExitStack, backend: Backend, policies: PolicyStore) -> None:
    """Begins to sweep the host, and to watch the policy's file."""
    sweeper = HostSweeper(backend, HOST_SWEEP_INTERVAL_S)
    stack.push_async_callback(sweeper.close)
    await sweeper.start()
    stack.push_async_callback(policies.close)
    await policies.start()


async def _start_backends(
    config: Config, stack: AsyncExitStack, egress: EgressOwner, environments: EnvironmentOwner
) -> Backend:
    """Starts the backends, which act as one. Environments end before them, and give their build sandboxes back."""
    backends = backends_of(config, egress.bundle, lambda: environments.service)
    environments.build_in(backends, egress.service, egress.bundle)
    backend = joined(backends)
    stack.push_async_callback(backend.close)
    await backend.start()
    stack.push_async_callback(environments.close)
    return backend


def _node(config: Config, own_state: StateDir) -> Node | None:
    """Returns the parts of a node; None for a daemon that belongs to no fleet. Raises ConfigError, StateDirError."""
    if config.fleet.role != "node":
        return None
    # Imported here: no other daemon needs them, nor the library for their certificates.
    from executor_server.fleet.daemons.node import Node

    return Node(config, own_state)


def _bind(stack: AsyncExitStack, parts: Parts, control: Control, node: Node | None) -> RpcServer | NodeServer:
    """Opens the listeners: for clients, or on a node for its front. Raises AddressError."""
    if control.watchers.trail is not None:
        stack.callback(control.watchers.trail.daemon_stopped)
    # The sessions end before the server does: their executions end as cancelled, and the callers still receive that.
    if node is not None:
        node_server = node.bind(stack, parts)
        stack.push_async_callback(parts.sessions.close)
        return node_server
    server = RpcServer(
        parts.service,
        control.identities,
        parts.settings,
        admin=parts.admin,
        observer=parts.observer,
        quotas=parts.quotas,
        wrappers=parts.wrappers,
    )
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    stack.push_async_callback(parts.sessions.close)
    server.bind()
    return server


def _admin(
    control: Control,
    egress: EgressOwner,
    environments: EnvironmentOwner,
    sessions: SessionManager,
    approvals: Approvals,
    views: SessionViews,
    status: DaemonStatus,
    audit_directory: Path,
) -> AdminService:
    policies = control.policies
    return AdminService(
        sessions,
        control.quotas,
        lambda: policies.current,
        partial(_reload, control, egress),
        control.watchers.admin_called,
        environments.service,
        approvals,
        views,
        status,
        AuditView(control.watchers.log, audit_directory),
        PolicyView(policies),
    )


def _follow_policy(
    control: Control, config: Config, egress: EgressOwner, pool: WarmPool, sessions: SessionManager
) -> None:
    """Applies the policy in force, now and whenever it is replaced."""

    def follow(policy: Policy) -> None:
        # The pool goes first: after this no session gets a sandbox that only the earlier policy approved.
        pool.keep_ready(policy.warm_sandboxes(config.pool))
        egress.follow(policy)
        sessions.follow(policy)
        sessions.renew_windows()  # the quotas may have changed

    control.listeners.on_change(follow)
    follow(control.policies.current)


async def _reload(control: Control, egress: EgressOwner) -> bool:
    """Reads policy, tokens and secrets again. Returns True when the policy changed. Raises ConfigError."""
    await control.reload_tokens()
    await egress.reload()
    return await control.policies.reload()


def _sources(parts: Parts, watchers: Watchers, environments: EnvironmentOwner, recordings: Recordings) -> Sources:
    return Sources(
        sessions=parts.sessions.list_all,
        pool=parts.pool.stats,
        policy=lambda: parts.policies.current,
        quotas=parts.quotas,
        audit=watchers.log.stats if watchers.log is not None else None,
        backends=parts.backend.states if isinstance(parts.backend, BackendSet) else dict,
        environments=environments.service.statistics,
        fork_server=partial(_fork_server_stats, parts.backend),
        recordings=recordings.stats,
    )


def _fork_server_stats(backend: Backend) -> ForkServerStats:
    """Returns the counts of the local backend, if there is one."""
    local = _local(backend)
    return ForkServerStats() if local is None else local.fork_server_stats()


def _local(backend: Backend) -> LocalBackend | None:
    members = backend.members() if isinstance(backend, BackendSet) else [backend]
    return next((member for member in members if isinstance(member, LocalBackend)), None)


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
