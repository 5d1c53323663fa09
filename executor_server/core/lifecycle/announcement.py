"""Announces that a daemon or a front serves."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from executor_server.core.config import StateDir

_log = structlog.get_logger(__name__)


def announce(listening: Sequence[str], own_state: StateDir) -> None:
    """Writes the addresses for a person or a waiting program, once their sockets accept calls."""
    token = f"; the token is in {own_state.token_path}" if own_state.token_path.exists() else ""  # a node has none
    sys.stdout.write(f"executor-server listens on {' and '.join(listening)}{token}\n")
    sys.stdout.flush()
    _log.info("daemon_listening", addresses=list(listening))
