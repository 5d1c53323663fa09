"""The parts of the daemon that a node of a fleet reports on and serves to its front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_server.api import AdminService, ExecutorService, ServerSettings, Wrapper
from executor_server.backends import Backend
from executor_server.core.lifecycle import Observer
from executor_server.policy import PolicyStore
from executor_server.policy.quotas import Quotas
from executor_server.sessions import SessionManager, StateArchives
from executor_server.sessions.pool import WarmPool


@dataclass(frozen=True)
class Parts:
    sessions: SessionManager
    pool: WarmPool
    quotas: Quotas
    backend: Backend
    policies: PolicyStore
    archives: StateArchives
    service: ExecutorService
    admin: AdminService
    observer: Observer
    settings: ServerSettings
    wrappers: Sequence[Wrapper]
