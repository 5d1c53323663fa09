"""A daemon as a node of a fleet: its link to the front, its lease, and what the front decides for it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version

import structlog

from executor_server.admission import NodeShare, Quotas
from executor_server.app.node_admission import LeasedAdmission
from executor_server.app.node_control import NodeControl
from executor_server.app.node_files import NodeFiles
from executor_server.app.node_lease import LeaseKeeper
from executor_server.app.node_reports import NodeReports, Reported
from executor_server.config import Config, ConfigError, StateDir
from executor_server.core import ExecutorError, TcpAddress, addresses
from executor_server.fleet import (
    CertificateError,
    Control,
    FrontHello,
    NodeHello,
    NodeLease,
    NodeReport,
    Renewal,
    Timing,
    lease_clock,
    read_credentials,
)
from executor_server.lifecycle import AdmissionController
from executor_server.rpc import Around, ServerSettings
from executor_server.rpc.fleet.lease_guard import LeaseGuard, fenced, placed_by_front
from executor_server.rpc.fleet.node_link import FleetService
from executor_server.rpc.fleet.node_server import FrontServices, NodeServer
from executor_server.sessions import SessionIds, SessionManager

PINGS_PER_ORPHAN_TIME = 4
VERSION = version("remote-executor")
STOP_GRACE_S = 1.0

_RANDOM_BYTES = 12
_TAIL = re.compile(r"[0-9a-f]{32}")

_log = structlog.get_logger(__name__)


class NodeIds(SessionIds):
    """Ids of a node: its name, 8 hexadecimal digits of the epoch, and 24 random ones.

    So of every id that the node has ever made it is known if the session is lost: that of an earlier epoch is.
    """

    def __init__(self, node: str, address: str, epoch: Callable[[], int]) -> None:
        self.node = node
        self.address = address
        self._epoch = epoch

    def new(self) -> str:
        return f"{self.node}-{self._epoch():08x}{secrets.token_hex(_RANDOM_BYTES)}"

    def why_lost(self, session_id: str) -> str:
        epoch = self._epoch_of(session_id)
        return "the node lost its lease" if epoch is not None and epoch < self._epoch() else ""

    def is_foreign(self, session_id: str) -> bool:
        return self._epoch_of(session_id) != self._epoch()

    def _epoch_of(self, session_id: str) -> int | None:
        node, _, tail = session_id.rpartition("-")
        return int(tail[:8], 16) if node == self.node and _TAIL.fullmatch(tail) else None


class Node:
    """The parts of a daemon that belongs to a fleet; implements `LinkedNode`. Nothing of it exists without a fleet."""

    def __init__(self, config: Config, state_dir: StateDir) -> None:
        """Raises ConfigError, StateDirError."""
        fleet = config.fleet
        assert fleet.certificates is not None and fleet.listen is not None, "the configuration requires both of a node"
        try:
            self._credentials = read_credentials(fleet.certificates, "node")
        except CertificateError as error:
            raise ConfigError([f"fleet.certificates: {error}"]) from error
        self._folder = fleet.certificates
        self._listen = addresses.parse(fleet.listen)
        self._files = NodeFiles(state_dir)
        self._clock = lease_clock
        timing = Timing(fleet.report_interval_s, fleet.lease_s, fleet.fence_s)
        self._lease = NodeLease(self._files.read_record(), self._files.write_record, timing, self._clock())
        self.guard = LeaseGuard(lambda: self._lease.serves(self._clock()))
        self.ids = NodeIds(
            self._credentials.member.node, _address_of(config), lambda: self._lease.epoch
        )
        self.config = self._adapted(config)
        """The configuration with what the fleet decides."""
        self._labels = dict(fleet.labels)
        self._quotas: Quotas | None = None
        self._running: _Running | None = None

    def _adapted(self, config: Config) -> Config:
        """Policy, tokens and state key are the front's; sandboxes whose daemon is dead end as fast as those of a node
        without a lease.
        """
        sessions = config.sessions
        orphan_time_s = min(sessions.orphan_time_s, config.fleet.fence_s)
        ping_interval_s = min(sessions.ping_interval_s, orphan_time_s / PINGS_PER_ORPHAN_TIME)
        key_file = self._files.state_key if self._files.state_key.exists() else config.state.key_file
        return config.model_copy(
            update={
                "sessions": sessions.model_copy(
                    update={"orphan_time_s": orphan_time_s, "ping_interval_s": ping_interval_s}
                ),
                "policy": config.policy.model_copy(update={"file": self._files.policy}),
                "server": config.server.model_copy(update={"token_file": self._files.tokens}),
                "state": config.state.model_copy(update={"key_file": key_file}),
            }
        )

    def admission(self, admission: AdmissionController) -> AdmissionController:
        return LeasedAdmission(admission, self._require_lease)

    def _require_lease(self) -> None:
        if not self._lease.serves(self._clock()):
            raise fenced()

    def client_guards(self, sessions: SessionManager) -> list[Around]:
        """Returns the guards of the listener for clients."""
        return [self.guard, placed_by_front(sessions.created)]
