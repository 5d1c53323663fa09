"""Puts the policy and the state key of a fleet in force on a node.

The node reports the fingerprint of a control once all of its parts are in force. Without it the front gives the node no
new sessions.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Mapping

import structlog

from executor_server.core.config import ConfigError
from executor_server.fleet.daemons.node_files import BUILT_IN_POLICY, NodeFiles, replace_file
from executor_server.fleet.membership import Control
from executor_server.policy import PolicyStore, copy_of
from executor_server.sessions import StateArchives

MAX_PROBLEM_CHARS = 1000
_STATE_KEY = re.compile(rb"[A-Za-z0-9_-]{32,256}")

_log = structlog.get_logger(__name__)


class NodeControl:
    """Takes controls, one after the other."""

    def __init__(self, files: NodeFiles, policies: PolicyStore, archives: StateArchives) -> None:
        self._files = files
        self._policies = policies
        self._archives = archives
        self._taking = asyncio.Lock()
        self.fingerprint = ""
        """The fingerprint of the control in force; empty while any part of it is not."""
        self.problem = ""
        """The reasons why parts of the last control are not in force, for people."""

    async def take(self, control: Control) -> None:
        """Puts a control in force as far as possible; `problem` names the rest. Its caller can't cancel it."""
        await asyncio.shield(self._take(control))

    async def _take(self, control: Control) -> None:
        async with self._taking:
            self.fingerprint = ""  # until all parts are in force
            problems = [
                f"{what}: {problem}"
                for what, step in (
                    ("state key", self._take_state_key(control.state_key)),
                    ("policy", self._take_policy(control.policy, control.locks)),
                )
                if (problem := await _problem_of(step))
            ]
            self.problem = _shown("; ".join(problems))
            if problems:
                _log.error("fleet_control_refused", fingerprint=control.fingerprint, problem=self.problem)
            else:
                self.fingerprint = control.fingerprint
                _log.info("fleet_control_in_force", fingerprint=control.fingerprint)

    async def _take_policy(self, data: bytes, locks: Mapping[str, bytes]) -> None:
        copies = {copy_of(path): content for path, content in locks.items()}
        locks = await asyncio.to_thread(self._files.replace_locks, copies)
        before = await asyncio.to_thread(replace_file, self._files.policy, data or BUILT_IN_POLICY)
        try:
            await self._policies.reload()
        except ConfigError:
            if before is not None:
                await asyncio.to_thread(replace_file, self._files.policy, before)
            await asyncio.to_thread(self._files.replace_locks, locks)
            raise

    async def _take_state_key(self, key: bytes) -> None:
        if not key:  # the front has none: states of this node are its own
            return
        if not _STATE_KEY.fullmatch(key):
            raise ConfigError(["it must be 32 to 256 of A-Z a-z 0-9 _ -"])
        await asyncio.to_thread(replace_file, self._files.state_key, key)
        self._archives.use_key(key)


async def _problem_of(step: Awaitable[None]) -> str:
    """Returns why a step failed; empty when it did not."""
    try:
        await step
    except ConfigError as error:
        return "; ".join(error.problems)
    except OSError as error:
        return str(error)
    return ""


def _shown(text: str) -> str:
    """Makes a text fit for a report: printable, and short."""
    shown = "".join(char if char.isprintable() else " " for char in text)
    return shown if len(shown) <= MAX_PROBLEM_CHARS else f"{shown[:MAX_PROBLEM_CHARS]}…"
