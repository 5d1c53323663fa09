"""The recording of an agent's run: its code, its tools, and what its model was asked and answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from smolagents import AgentGenerationError, tool

from executor_client import Recorder, Recording
from tests.support.agents import agent_on
from tests.support.daemon import Daemon


@tool
def price(item: str) -> int:
    """Looks up a price.

    Args:
        item: What to look up.
    """
    return len(item)


def read(path: Path) -> tuple[list[str], list[dict[str, Any]], list[Any]]:
    """Returns the kinds of the entries, the calls of the model, and the outputs of the steps."""
    with Recording(path) as recording:
        entries = list(recording.entries())
        calls = [dict(entry.fields) for entry in entries if entry.kind == "model"]
        for call in calls:
            call["messages"] = [json.loads(recording.payload(each)) for each in call["messages"]]
            if "answer" in call:
                call["answer"] = json.loads(recording.payload(call["answer"]))
        results = [recording.result(step) for step in recording.steps()]
        return [entry.kind for entry in entries], calls, [result and result.output for result in results]


def test_a_run_is_in_one_file_with_the_calls_of_its_model(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "run.rxr"
    programs = ("x = price('vase')", "final_answer({'price': x})")
    agent = agent_on(daemon, *programs, tools=[price], executor_kwargs={"record": path})
    model = agent.model
    assert type(model).__name__ == "ScriptedModel" and not model.finished
    assert "record" not in agent.to_dict()["executor_kwargs"]
    with agent:
        assert agent.run("What is the price of a vase?") == {"price": 4}
    assert model.finished

    kinds, calls, outputs = read(path)
    assert kinds[0] == "session" and kinds.index("model") < kinds.index("execute")
    assert outputs == [4, {"price": 4}]
    for call, program in zip(calls, programs, strict=True):
        assert call["model"] == "scripted" and program in call["answer"]["content"]
    first, second = (call["messages"] for call in calls)
    assert "What is the price of a vase?" in json.dumps(first) and second[: len(first)] == first
    # A message that each request repeats is in the file once: the prompt alone has some 10 KB.
    assert path.stat().st_size < 1.5 * len(json.dumps(second)) + 10_000


def test_a_failing_model_is_recorded_and_several_agents_share_a_recorder(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "runs.rxr"
    with Recorder(path) as recorder:
        for number in (1, 2):
            agent = agent_on(daemon, f"x = {number}", executor_kwargs={"record": recorder})
            with agent, pytest.raises(AgentGenerationError):
                agent.run("Fail.", max_steps=2)
    kinds, calls, outputs = read(path)
    assert kinds.count("session") == 2 and outputs == [1, 2]
    assert [call["error"]["type"] for call in calls if "error" in call]
