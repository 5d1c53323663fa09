"""The policy and the tokens that a front gives its nodes: always those that are in force at the front itself."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from executor_server.fleet import Control, fingerprint_of
from executor_server.identity import FrontTokens, TokenNews, Tokens
from executor_server.policy import Policy, PolicyStore

_log = structlog.get_logger(__name__)


class FleetControl:
    """Keeps the control of the fleet up to date; `current` is sent to every node that has another one."""

    def __init__(self, policies: PolicyStore, tokens: Tokens, records: FrontTokens, state_key: bytes) -> None:
        self._policies = policies
        self._records = records
        self._state_key = state_key
        self._on_change: Callable[[str], None] | None = None
        self.current = self._made()
        tokens.listen(self._tokens_changed)

    def on_change(self, notify: Callable[[str], None]) -> None:
        """Sets who hears of the fingerprint of another control, and of the present one at once."""
        self._on_change = notify
        notify(self.current.fingerprint)

    def follow(self, _policy: Policy) -> None:
        """Takes over the policy in force."""
        self._renew()

    def _tokens_changed(self, _news: TokenNews) -> None:
        self._renew()

    def _renew(self) -> None:
        before, self.current = self.current, self._made()
        if self.current.fingerprint != before.fingerprint:
            _log.info("fleet_control_changed", fingerprint=self.current.fingerprint)
            if self._on_change is not None:
                self._on_change(self.current.fingerprint)

    def _made(self) -> Control:
        policy, tokens = self._policies.content, self._records.content()
        return Control(policy, tokens, fingerprint_of(policy, tokens, self._state_key), self._state_key)
