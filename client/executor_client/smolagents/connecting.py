"""Connects a client of an executor. By default it asks for approvals at the terminal."""

from __future__ import annotations

from contextlib import closing

from executor_client import (
    AuthorizationError,
    ExecutorClient,
    OnApproval,
    OnWait,
    Policy,
    TlsConfig,
    ask_in_terminal,
)
from executor_client._core.terminal_prompt import has_terminal


def connect(
    address: str | None,
    token: str | None,
    tls: TlsConfig | bool | None,
    on_wait: OnWait,
    on_approval: OnApproval | None,
) -> ExecutorClient:
    """Returns a client. Without an `on_approval`, it asks at this process's terminal if there is one, if the policy
    leaves anything to a person, and if the caller may decide.

    Raises ExecutorClientError.
    """
    if on_approval is None and has_terminal():
        with ExecutorClient(address, token=token, tls=tls, on_wait=on_wait) as client:
            if _asks(client.get_policy()) and _may_decide(client):
                on_approval = ask_in_terminal
    return ExecutorClient(address, token=token, tls=tls, on_wait=on_wait, on_approval=on_approval)


def _asks(policy: Policy) -> bool:
    return bool(policy.ask_imports or policy.ask_tools or policy.network.ask or policy.packages.ask)


def _may_decide(client: ExecutorClient) -> bool:
    try:
        with closing(client.watch_approvals()) as lists:
            next(lists)
    except AuthorizationError:
        return False
    return True
