"""A pytest plugin: agents that are recorded once, and then run offline from the recording.

    # conftest.py
    pytest_plugins = ["executor_client.pytest_plugin"]

    # test_shop.py
    def test_prices(recorded_agent):
        agent = recorded_agent(CodeAgent(tools=[price], model=model))
        assert agent.run("What is the price of a vase?") == 4

docs/recording.md describes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

_NOT_IN_A_NAME = re.compile(r"[^\w.-]+")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("remote-executor").addoption(
        "--remote-executor-record",
        choices=("none", "once", "all"),
        default="none",
        help="none: recorded agents run from their recordings (default); once: agents without a recording run and are "
        "recorded; all: all of them run and are recorded anew",
    )


@pytest.fixture
def recorded_agent(request: pytest.FixtureRequest) -> Iterator[Callable[[Any], Any]]:
    """Returns a function that takes an agent and returns it, recorded or replayed; to be called before its first run.

    The recordings are next to the test file: recordings/FILE/TEST.rxr, with a number for further agents of a test.
    """
    from executor_client.recording import Recording
    from executor_client.smolagents.replaying import record_agent, replay_agent

    mode = request.config.getoption("--remote-executor-record")
    directory = request.path.parent / "recordings" / request.path.stem
    name = _NOT_IN_A_NAME.sub("-", request.node.name).strip("-")
    agents = 0

    with ExitStack() as until_tested:

        def prepared(agent: Any) -> Any:
            nonlocal agents
            agents += 1
            path = directory / (f"{name}.rxr" if agents == 1 else f"{name}-{agents}.rxr")
            if mode == "all" or (mode == "once" and not path.exists()):
                directory.mkdir(parents=True, exist_ok=True)
                record_agent(agent, path)
            elif path.exists():
                replay_agent(agent, until_tested.enter_context(Recording(path)))
            else:
                pytest.fail(f"{path} is missing: record it with --remote-executor-record=once", pytrace=False)
            until_tested.callback(agent.cleanup)
            return agent

        yield prepared
