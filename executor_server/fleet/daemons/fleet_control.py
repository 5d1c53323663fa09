"""The policy that a front gives its nodes: the one in force at the front itself."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from executor_server.core.config import ConfigError
from executor_server.fleet.membership import MAX_LOCKS, MAX_LOCKS_BYTES, Control, fingerprint_of
from executor_server.policy import Policy, PolicyStore

_log = structlog.get_logger(__name__)


class FleetControl:
    """Keeps the control of the fleet up to date; `current` is sent to every node that has another one."""

    def __init__(self, policies: PolicyStore, state_key: bytes, on_change: Callable[[str], None]) -> None:
        """`on_change` receives the fingerprint of each control, the first one included."""
        self._policies = policies
        self._state_key = state_key
        self._on_change = on_change
        self.current = self._made()
        on_change(self.current.fingerprint)

    def follow(self, _policy: Policy) -> None:
        """Takes over the policy in force."""
        before, self.current = self.current, self._made()
        if self.current.fingerprint != before.fingerprint:
            _log.info("fleet_control_changed", fingerprint=self.current.fingerprint)
            self._on_change(self.current.fingerprint)

    def _made(self) -> Control:
        policy, locks = self._policies.content, self._policies.current.locks
        return Control(policy, fingerprint_of(policy, self._state_key, locks), self._state_key, locks)


def check_locks(policy: Policy) -> Policy:
    """Returns the policy. Raises ConfigError when its lock files are too many or too large for a message to a node."""
    locks = policy.locks
    if len(locks) > MAX_LOCKS:
        raise ConfigError(
            [f"The policy names {len(locks):,} lock files; a front sends at most {MAX_LOCKS} to its nodes."]
        )
    size_bytes = sum(map(len, locks.values()))
    if size_bytes > MAX_LOCKS_BYTES:
        text = f"The lock files of the policy have {size_bytes:,} bytes; a front sends at most {MAX_LOCKS_BYTES:,}."
        raise ConfigError([text])
    return policy
