"""A process with an agent whose code waits for a tool that hangs: `python -m tests.integration.hanging_agent ADDRESS TOKEN`.

It says so on its output. Its session ends a second after its last use.
"""

from __future__ import annotations

import sys
import threading

from smolagents import LogLevel, tool

from executor_client.smolagents import CodeAgent
from tests.support.agents import scripted


@tool
def hang() -> None:
    """Hangs."""
    print("in the tool", flush=True)  # noqa: T201 - for the process that started this
    threading.Event().wait()


if __name__ == "__main__":
    address, token = sys.argv[1:]
    kwargs = {"address": address, "token": token, "limits": {"idle_time_s": 1.0}}
    with CodeAgent(
        tools=[hang], model=scripted("hang()"), executor_kwargs=kwargs, max_steps=1, verbosity_level=LogLevel.OFF
    ) as agent:
        agent.run("go")
