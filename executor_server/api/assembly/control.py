"""The start that a daemon and a front share: tokens, policy and quotas, and the parts that record their use."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from executor_server.api.assembly.settings import capacity_of
from executor_server.api.assembly.watchers import PolicyListeners, Watchers
from executor_server.core.config import Config, ConfigError, StateDir, state_dir
from executor_server.policy import WATCH_INTERVAL_S, Policy, PolicyFile, PolicyStore
from executor_server.policy.identity import Identities, TokenFile, TokenFileError, Tokens
from executor_server.policy.quotas import Capacity, Quotas, UsageStore


@dataclass(frozen=True)
class Control:
    """The parts that decide about rights, and that record what happens. A node has no tokens: its front does."""

    tokens: Tokens | None
    policies: PolicyStore
    listeners: PolicyListeners
    quotas: Quotas
    capacity: Capacity | None
    watchers: Watchers

    @property
    def identities(self) -> Identities:
        assert self.tokens is not None, "a node identifies no clients"
        return Identities(self.tokens, lambda: self.policies.current)

    async def reload_tokens(self) -> None:
        """Raises ConfigError."""
        try:
            if self.tokens is not None:
                await self.tokens.reload()
        except TokenFileError as error:
            raise ConfigError([str(error)]) from error


def read_tokens(config: Config, own_state: StateDir) -> Tokens:
    token_file = TokenFile(config.server.token_file or own_state.tokens_path)
    return Tokens(state_dir.read_or_make_token(own_state), token_file)


async def start_control(
    config: Config,
    stack: AsyncExitStack,
    tokens: Tokens | None,
    make_policy: Callable[[PolicyFile], Policy],
    *,
    version: str,
    backend: str,
    max_sessions: int,
    usage: UsageStore | None = None,
    copies: Path | None = None,
) -> Control:
    """Reads the policy, and starts what counts and records its use.

    `max_sessions` is the number of sessions that tenants share. A node ignores it: the front shares out the fleet's
    sessions. `copies` is the directory of the policy's lock files on a node.
    """
    watchers = Watchers.build(config, version, backend)
    listeners = PolicyListeners([watchers.trail, watchers.metrics])
    policies = PolicyStore(config.policy.file, make_policy, WATCH_INTERVAL_S, listeners, copies)
    capacity = None if tokens is None else capacity_of(config, lambda: policies.current, tokens, max_sessions)
    quotas = Quotas(lambda tenant: policies.current.quotas_of(tenant), usage, capacity=capacity)
    stack.enter_context(closing(quotas))
    await watchers.start(stack, tokens, policies.current, version, backend)
    return Control(tokens, policies, listeners, quotas, capacity, watchers)
