"""A daemon as a node of a fleet: its listener for the front, its heartbeat, and the front's decisions for it.

Without `fleet.role = "node"` none of this exists.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import structlog

from executor_server.api import refusals_to
from executor_server.api.assembly.parts import Parts
from executor_server.api.assembly.settings import policy_of
from executor_server.core import InvalidRequest, addresses
from executor_server.core.config import Config, ConfigError, StateDir
from executor_server.fleet.api import wire
from executor_server.fleet.api.node_link import FleetService
from executor_server.fleet.api.node_server import FrontServices, NodeServer
from executor_server.fleet.daemons.fencing import Fencing
from executor_server.fleet.daemons.node_control import NodeControl
from executor_server.fleet.daemons.node_files import NodeFiles
from executor_server.fleet.daemons.node_reports import EndedSessions, NodeReports
from executor_server.fleet.membership import (
    MAX_NODE_SESSIONS,
    CertificateError,
    Control,
    FrontHello,
    Heartbeat,
    NodeHello,
    NodeReport,
    Renewal,
    Timing,
    epoch_of,
    new_session_id,
    node_of,
    read_credentials,
)
from executor_server.policy import load_policy
from executor_server.sessions import SessionIds

VERSION = version("remote-executor")
WARN_BEFORE_EXPIRY = timedelta(days=30)
MAX_SESSIONS = MAX_NODE_SESSIONS // 2
"""Sessions of a node: one report has room for all of them, and for as many that have ended since the last one."""
# A sandbox that was frozen gets its whole time again, once.
ORPHAN_TIMES_UNTIL_GONE = 2
# Seconds for calls of the front to end, after the sessions have ended.
STOP_GRACE_S = 1.0

_log = structlog.get_logger(__name__)


class NodeIds(SessionIds):
    """Ids that name the node and the epoch, so that each session of an earlier epoch is known to be lost."""

    def __init__(self, node: str, epoch: Callable[[], int]) -> None:
        self.node = node
        self._epoch = epoch

    def new(self) -> str:
        return new_session_id(self.node, self._epoch())

    def why_lost(self, session_id: str) -> str:
        is_lost = node_of(session_id) == self.node and epoch_of(session_id) < self._epoch()
        return "the node lost its lease" if is_lost else ""

    def is_foreign(self, session_id: str) -> bool:
        return node_of(session_id) != self.node or epoch_of(session_id) != self._epoch()


class Node:
    """The parts that only a node has. They exist before the daemon's; `bind` connects both."""

    def __init__(self, config: Config, state_dir: StateDir) -> None:
        """Raises ConfigError, StateDirError, AddressError."""
        _check(config)
        fleet = config.fleet
        assert fleet.certificates is not None and fleet.listen is not None, "the configuration requires both of a node"
        try:
            credentials = read_credentials(fleet.certificates, "node")
        except CertificateError as error:
            raise ConfigError([f"fleet.certificates: {error}"]) from error
        left = credentials.expire_time - datetime.now(UTC)
        if left < WARN_BEFORE_EXPIRY:
            _log.warning("fleet_certificate_expires", expire_time=credentials.expire_time.isoformat(), days=left.days)
        self._files = NodeFiles(state_dir)
        self.config = self._adapted(config)
        """The configuration, with the fleet's decisions."""
        self._check_policy()
        timing = Timing(fleet.report_interval_s, fleet.lease_s, fleet.fence_s)
        record = self._files.read_record()
        self._heartbeat = Heartbeat(record, self._files.write_record, timing, time.monotonic())
        self.ids = NodeIds(credentials.member.node, lambda: self._heartbeat.epoch)
        self.ended = EndedSessions(self.ids.node)
        _log.info("fleet_node", node=self.ids.node, epoch=record.epoch)

    def _adapted(self, config: Config) -> Config:
        """Returns the configuration with the front's policy and state key.

        A sandbox whose daemon is dead ends as fast as one of a node whose front is silent.
        """
        sessions = config.sessions
        orphan_time_s = min(sessions.orphan_time_s, config.fleet.fence_s)
        state_key = self._files.state_key if self._files.state_key.exists() else config.state.key_file
        return config.model_copy(
            update={
                "sessions": sessions.model_copy(update={"orphan_time_s": orphan_time_s}),
                "policy": config.policy.model_copy(update={"file": self._files.policy}),
                "state": config.state.model_copy(update={"key_file": state_key}),
            }
        )

    def _check_policy(self) -> None:
        """Replaces a policy that this daemon can no longer serve by the built-in one; the front sends its own again."""
        try:
            policy_of(self.config, load_policy(self._files.policy, self._files.locks))
        except ConfigError as error:
            _log.error("fleet_policy_dropped", problems=error.problems)
            self._files.drop_policy()

    def bind(self, stack: AsyncExitStack, parts: Parts) -> NodeServer:
        """Opens the listener for the front, until the stack is left; calls wait for its start. Raises AddressError."""
        config = self.config
        assert config.fleet.listen is not None and config.fleet.certificates is not None
        fencing = Fencing(self._heartbeat, parts.sessions, ORPHAN_TIMES_UNTIL_GONE * config.sessions.orphan_time_s)
        control = NodeControl(self._files, parts.policies, parts.archives)
        reports = NodeReports(config, parts, control, self.ended)
        link = FleetService(_Linked(self.ids, config, fencing, reports, control, parts))
        server = NodeServer(
            addresses.parse(config.fleet.listen),
            config.fleet.certificates,
            FrontServices(link, parts.service, parts.admin),
            parts.settings,
            refusals_to(parts.observer),
            lambda: self._heartbeat.obeyed,
            wrappers=parts.wrappers,
            on_start=fencing.start,
        )
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.push_async_callback(link.last_report)
        stack.push_async_callback(fencing.close)
        _log.info("fleet_listening", address=str(server.bind()))
        return server


class _Linked:
    """The node, as its link sees it."""

    def __init__(
        self,
        ids: NodeIds,
        config: Config,
        fencing: Fencing,
        reports: NodeReports,
        control: NodeControl,
        parts: Parts,
    ) -> None:
        self._ids = ids
        self._labels = dict(config.fleet.labels)
        self._fencing = fencing
        self._reports = reports
        self._control = control
        self._quotas = parts.quotas

    async def hello(self, hello: FrontHello) -> NodeHello:
        await self._fencing.begin_link(hello)
        heartbeat = self._fencing.heartbeat
        return NodeHello(
            node=self._ids.node,
            epoch=heartbeat.epoch,
            instance=heartbeat.record.instance,
            labels=self._labels,
            program_version=VERSION,
        )

    def report(self, *, full: bool) -> NodeReport:
        return self._reports.build(self._fencing.heartbeat.epoch, full=full)

    def renewed(self, renewal: Renewal) -> None:
        if self._fencing.heartbeat.renewed(time.monotonic()):
            self._quotas.limit_egress(renewal.egress_bytes)

    async def take_control(self, control: Control) -> None:
        await self._control.take(control)


def _check(config: Config) -> None:
    """Raises ConfigError for settings that a node can't have."""
    problems = list(_problems(config))
    if problems:
        raise ConfigError(problems)


def _problems(config: Config) -> Iterator[str]:
    server = config.server
    for key, value in (("policy.file", config.policy.file), ("state.key_file", config.state.key_file)):
        if value is not None:
            yield f"{key}: can't be set for a node, which has it from its front (it is {str(value)!r})"
    for key in ("listen", "token_file", "peer_socket", "tls_cert", "tls_key", "tls_client_ca"):
        if getattr(server, key):
            yield f"server.{key}: can't be set for a node: clients reach its sessions through the front alone"
    if config.sessions.max_sessions > MAX_SESSIONS:
        yield f"sessions.max_sessions: must be at most {MAX_SESSIONS:,} for a node"
    try:
        wire.labels_from(config.fleet.labels.items(), "fleet.labels")
    except InvalidRequest as error:
        yield error.message
