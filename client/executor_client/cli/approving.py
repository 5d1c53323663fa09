"""`executor approvals`, and `--ask` of other commands: a person decides the requests that the policy leaves open."""

from __future__ import annotations

import argparse
import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator

from executor_client._core.limits import APPROVAL_ENDED_CHECK_S, WATCH_AGAIN_S
from executor_client._core.terminal_prompt import ask_in_terminal, has_terminal
from executor_client.approvals import Approval, ApprovalDecision, OnApproval
from executor_client.cli import EXIT_SUCCEEDED
from executor_client.cli.console import Console
from executor_client.client import ExecutorClient
from executor_client.errors import ExecutorClientError, NotFoundError, UnavailableError

typing = threading.Lock()
"""Held while a person types something else, as in the repl: `--ask` waits for it."""


def on_approval(options: argparse.Namespace, console: Console) -> OnApproval | None:
    """Returns the `on_approval` for `--ask`; None without it, and without a terminal."""
    if not getattr(options, "ask", False):
        return None
    if not has_terminal():
        console.remark("--ask has no terminal to ask in: what needs an approval is refused, unless others approve it")
        return None
    return _ask


def _ask(approval: Approval) -> ApprovalDecision:
    while approval.is_waiting:
        if typing.acquire(timeout=APPROVAL_ENDED_CHECK_S):
            try:
                return ask_in_terminal(approval)
            finally:
                typing.release()
    return "deny"


def watch(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Shows each request that waits, and asks for the decision if there is a terminal. Ends by an interrupt."""
    client.get_policy()  # raises the reason if no daemon answers
    if options.json or not has_terminal():
        for approval in _new(client, console):
            console.show_lines([_json(approval) if options.json else f"{approval.approval_id}  {approval}"])
        return EXIT_SUCCEEDED
    console.remark("waiting for requests; Ctrl-C ends")
    arrived: queue.SimpleQueue[Approval | ExecutorClientError] = queue.SimpleQueue()

    def read() -> None:
        try:
            for approval in _new(client, console):
                arrived.put(approval)
        except ExecutorClientError as error:
            arrived.put(error)

    threading.Thread(target=read, name="executor-approvals", daemon=True).start()
    while not isinstance(item := arrived.get(), ExecutorClientError):
        if item.is_waiting:
            decision = ask_in_terminal(item)
            with contextlib.suppress(NotFoundError):  # it ended before the answer
                client.decide_approval(item.approval_id, decision)
    raise item


def decide(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Approves or denies the request with the given id."""
    client.decide_approval(options.approval_id, options.decision)
    return EXIT_SUCCEEDED


def _new(client: ExecutorClient, console: Console) -> Iterator[Approval]:
    """Yields each waiting request once, and watches again after a daemon went away."""
    has_watched, known = False, frozenset[str]()
    while True:
        try:
            for waiting in client.watch_approvals():
                has_watched = True
                yield from (each for each in waiting if each.approval_id not in known)
                known = frozenset(each.approval_id for each in waiting)
        except UnavailableError as error:
            if error.reason == "CLIENT_CLOSED" or not has_watched:
                raise
            console.remark("the daemon does not answer; watching again")
        time.sleep(WATCH_AGAIN_S)


def _json(approval: Approval) -> str:
    fields = {name: value for name, value in vars(approval).items() if not name.startswith("_")}
    fields |= {"kind": approval.kind.value, "create_time": approval.create_time.isoformat()}
    return json.dumps(fields)
