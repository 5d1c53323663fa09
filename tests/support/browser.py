"""Reads what a browser in a sandbox shows, once it shows it."""

from __future__ import annotations

from typing import Any, NamedTuple

from executor_client.smolagents import RemoteExecutor
from tests.support.polling import eventually


class Seen(NamedTuple):
    value: Any
    logs: str


def see(executor: RemoteExecutor, step: str, expression: str, wanted: object) -> Seen:
    """Runs a step, and then evaluates an expression about the page until it is `wanted`, or for as long as tests wait.

    Drivers return from clicks and from pages of errors before the browser shows what comes of them. Returns the last
    value, and the logs of all steps.
    """
    logs = executor(step).logs
    value: Any = None

    def look() -> bool:
        nonlocal logs, value
        output = executor(expression)
        logs, value = logs + output.logs, output.output
        return bool(value == wanted)

    eventually(look)
    return Seen(value, logs)
