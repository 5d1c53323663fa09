"""The result of a run: how it ended, and what it used."""

from __future__ import annotations

from typing import Any

import pytest

from executor_server.guest.files.artifacts import Artifacts
from executor_server.guest.supervisor.prelude import REQUEST
from executor_server.guest.supervisor.results import Results
from executor_server.guest.supervisor.run import Run
from executor_server.guest.wire.messages import Result
from tests.support.clock import Clock

_REQUEST = REQUEST.but(id="e")


class SlowArtifacts(Artifacts):
    """Takes a minute to find nothing."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def found(self) -> Any:
        self._clock.now_s += 60.0
        return [], False


class SlowChannel:
    """Takes a minute for a value that is sent ahead of the result, and keeps the result."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.results: list[Result] = []

    def send_blob(self, data: bytes | int, size: int, *, execution_id: str) -> str:
        self._clock.now_s += 60.0
        return "g1"

    def send(self, result: Result, body: bytes) -> None:
        self.results.append(result)


def test_the_time_to_describe_a_result_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("executor_server.guest.supervisor.run.time", clock)
    channel: Any = SlowChannel(clock)
    run = Run(_REQUEST, "1", 1, channel)
    clock.now_s += 2.5
    run.artifacts = SlowArtifacts(clock)
    run.output, run.output_size = b"a large value", 10**7
    Results(channel).send(run, "succeeded", None)
    assert [(result.blob, result.wall_time_s) for result in channel.results] == [("g1", 2.5)]


def test_notices_between_two_results_are_bounded_and_stand_in_the_first_result() -> None:
    said: list[str] = []
    channel: Any = SlowChannel(Clock())
    results = Results(channel)
    for number in range(10_000):
        results.notify(f"{number}\n")
    for name in ("e1", "e2"):
        run = Run(_REQUEST.but(id=name), "1", 1, channel)
        run.logs.say = lambda _stream, text, name=name: said.append(f"{name}: {text}")  # type: ignore[misc, method-assign]
        results.send(run, "cancelled", None)
    assert said[0] == "e1: 0\n"
    assert 16 <= len(said) <= 256
    assert not [text for text in said if text.startswith("e2")]
