"""Builds the front of a fleet from its configuration, runs it, and shuts it down in order.

A front has no backend and no sessions of its own, so it starts fast and stops at once. The sessions on its nodes go on
without it for a while, and the next front finds them.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import structlog
import uvloop

from executor_server.api import Asking, AuditView, PolicyView, RpcServer
from executor_server.api.assembly.control import Control, read_tokens, start_control
from executor_server.api.assembly.settings import server_settings
from executor_server.backends import open_files
from executor_server.core import logs
from executor_server.core.config import Config, ConfigError, StateDir, StateDirError, state_dir
from executor_server.core.fairness import FairSemaphore
from executor_server.core.lifecycle import Observers
from executor_server.core.lifecycle.announcement import announce
from executor_server.core.lifecycle.signals import Signals, handled_signals
from executor_server.fleet.api.dialing import Dialers
from executor_server.fleet.api.fleet_news import FleetNews
from executor_server.fleet.api.front_admin import FrontAdmin
from executor_server.fleet.api.front_fleet import FrontFleet
from executor_server.fleet.api.front_service import BY_HAND, FrontService
from executor_server.fleet.api.front_sessions import SessionNames
from executor_server.fleet.api.front_status import FrontStatus
from executor_server.fleet.api.front_views import FrontViews
from executor_server.fleet.api.moving import Mover
from executor_server.fleet.api.node_approvals import NodeApprovals
from executor_server.fleet.api.node_choice import NodeChoice
from executor_server.fleet.api.proxy import proxy_handlers
from executor_server.fleet.api.session_creator import SessionCreator
from executor_server.fleet.daemons.fleet_control import FleetControl, check_locks
from executor_server.fleet.membership import (
    CertificateError,
    Discovery,
    FleetStore,
    FleetUsage,
    Members,
    Placement,
    Reservations,
    Timing,
    lease_clock,
)
from executor_server.policy import QuotasTable, policy_for
from executor_server.policy.approvals import Approvals
from executor_server.policy.quotas import Admission

VERSION = version("remote-executor")
BACKEND = "fleet"
"""The name of a front's backend in the metrics and the audit log."""
UNLIMITED = 2**31
"""The front itself does not limit sessions: its nodes do."""
# Seconds for calls to end.
STOP_GRACE_S = 1.0

_log = structlog.get_logger(__name__)


def serve_front(config: Config, read_again: Callable[[], Config]) -> None:
    """Runs the front until a signal stops it, or another one has taken all its nodes.

    Raises ConfigError, StateDirError, AddressError, AuditDirError.

    `read_again` returns the configuration as its files have it now, or raises ConfigError.
    """
    logs.configure(config.log.level, config.log.format)
    open_files.raise_limit()
    uvloop.run(_serve(config, read_again))


async def _serve(config: Config, read_again: Callable[[], Config]) -> None:
    async with AsyncExitStack() as stack:
        signals = stack.enter_context(handled_signals())
        front = await start_up(config, stack, read_again)
        signals.on_reload(front.reload_soon)
        announce(await front.server.start(), front.own_state)
        await _until_its_end(signals, front.is_superseded)
        _log.info("front_stopping")
        await front.server.announce_end()


async def _until_its_end(signals: Signals, is_superseded: asyncio.Event) -> None:
    """Returns when a signal asks for the end, or no node obeys this front any more: its clients must find the other."""
    superseded = asyncio.create_task(is_superseded.wait())
    stopped = asyncio.create_task(signals.first())
    await asyncio.wait((superseded, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not stopped.done():
        _log.error("front_superseded", remedy="another front has this state directory or a copy of it; run one of them")
    for task in (superseded, stopped):
        task.cancel()
    await asyncio.gather(superseded, stopped, return_exceptions=True)


@dataclass(frozen=True)
class _Knowledge:
    """The parts that know the nodes."""

    members: Members
    reservations: Reservations
    placement: Placement
    quotas_of: Callable[[str], QuotasTable]


@dataclass(frozen=True)
class _Front:
    own_state: StateDir
    control: Control
    server: RpcServer
    refuse_again: Callable[[], None]
    is_superseded: asyncio.Event

    def reload_soon(self) -> None:
        self.control.policies.reload_soon()
        try:
            self.refuse_again()
        except ConfigError as error:
            _log.error("refused_nodes_kept", problems=error.problems)


async def start_up(config: Config, stack: AsyncExitStack, read_again: Callable[[], Config] | None = None) -> _Front:
    """Builds and starts the parts from the bottom up. `read_again` is as for serve_front."""
    settings = server_settings(config)
    own_state = stack.enter_context(state_dir.claim(config.server.state_dir))
    dialer = _dialer(config)
    tokens = read_tokens(config, own_state)
    state_key = state_dir.read_or_make_state_key(own_state, config.state.key_file)
    control = await start_control(
        config,
        stack,
        tokens,
        lambda file: check_locks(policy_for(file, config)),
        version=VERSION,
        backend=BACKEND,
        max_sessions=UNLIMITED,
    )
    watchers, policies = control.watchers, control.policies
    knowledge = _knowledge(config, stack, own_state, control)
    fleet_control = FleetControl(policies, state_key, knowledge.placement.set_fingerprint)
    control.listeners.on_change(fleet_control.follow)
    choice = NodeChoice(knowledge.members, knowledge.placement, config.fleet.park_s)
    news = FleetNews(watchers.fleet, watchers.metrics, lambda: choice.parked)
    fleet = FrontFleet(
        knowledge.members,
        FleetUsage(knowledge.quotas_of),
        dialer.current,
        lambda: fleet_control.current,
        news,
        version=VERSION,
        wrong_retry_s=config.fleet.wrong_retry_s,
    )
    refuse_again = partial(_refuse_again, fleet, read_again or (lambda: config))
    refuse_again()
    approvals = Approvals(watchers.approval_observer())
    stack.callback(approvals.close)
    views = FrontViews(fleet)
    fleet.followers += [NodeApprovals(fleet, approvals).follow, views.follow]
    fleet.on_lost.append(views.node_lost)
    admission, asking = Admission(control.quotas, FairSemaphore(1), watchers.log), Asking(approvals)
    names = SessionNames(fleet)
    creations = SessionCreator(
        lambda: policies.current, fleet, names, knowledge.reservations, choice, admission, asking, news
    )
    watching = [each for each in (watchers.trail, watchers.metrics) if each is not None]
    admin = FrontAdmin(
        fleet,
        knowledge.reservations,
        control.quotas,
        Mover(fleet, creations, names, lambda: policies.current, news),
        lambda: choice.parked,
        approvals,
        lambda: policies.current,
        partial(_reload, control, refuse_again),
        watchers.admin_called,
        AuditView(watchers.log, config.audit_directory),
        PolicyView(policies),
        FrontStatus(VERSION, time.time(), approvals, lambda: policies.current, watchers.log),
        views,
    )
    server = RpcServer(
        FrontService(lambda: policies.current, fleet, creations, names),
        control.identities,
        settings,
        admin=admin,
        observer=Observers(watching),
        quotas=control.quotas,
        wrappers=watchers.wrappers(),
        handlers=proxy_handlers(fleet, by_hand=BY_HAND),
    )
    if watchers.trail is not None:
        stack.callback(watchers.trail.daemon_stopped)
    stack.push_async_callback(fleet.close)
    stack.push_async_callback(creations.close)
    stack.push_async_callback(server.stop, STOP_GRACE_S)
    server.bind()
    await watchers.serve_metrics(stack, config.metrics.listen, None)
    await _look_for_nodes(config, stack, fleet)
    stack.push_async_callback(policies.close)
    await policies.start()
    return _Front(own_state, control, server, refuse_again, fleet.is_superseded)


def _dialer(config: Config) -> Dialers:
    assert config.fleet.certificates is not None, "FleetSection requires it of a front"
    try:
        return Dialers(config.fleet.certificates)
    except CertificateError as error:
        raise ConfigError([f"fleet.certificates: {error}"]) from error


def _knowledge(config: Config, stack: AsyncExitStack, own_state: StateDir, control: Control) -> _Knowledge:
    """Raises StateDirError."""
    store = stack.enter_context(closing(FleetStore(own_state.fleet_path)))
    section = config.fleet
    timing = Timing(section.report_interval_s, section.lease_s, section.fence_s)
    try:
        members = Members(store, timing, lease_clock(), time.time())
    except sqlite3.Error as error:
        raise StateDirError(f"The front's file {own_state.fleet_path} can't be written: {error}.") from error
    except ValueError as error:
        raise ConfigError([f"fleet: {error}"]) from error

    def quotas_of(tenant: str) -> QuotasTable:
        return control.policies.current.quotas_of(tenant)

    assert control.capacity is not None, "a front has tokens"
    reservations = Reservations(members, quotas_of, control.capacity.is_shared)
    return _Knowledge(members, reservations, Placement(members), quotas_of)


async def _look_for_nodes(config: Config, stack: AsyncExitStack, fleet: FrontFleet) -> None:
    discovery = Discovery(config.fleet, fleet.follow)
    stack.push_async_callback(discovery.close)
    await fleet.start()
    await discovery.start()


def _refuse_again(fleet: FrontFleet, read_again: Callable[[], Config]) -> None:
    """Reads again which nodes are refused. Raises ConfigError; then the earlier ones stay refused."""
    fleet.refuse(frozenset(read_again().fleet.refused_nodes))


async def _reload(control: Control, refuse_again: Callable[[], None]) -> bool:
    """Reads policy, tokens and refused nodes again. Returns True when the policy changed. Raises ConfigError."""
    refuse_again()
    await control.reload_tokens()
    return await control.policies.reload()
