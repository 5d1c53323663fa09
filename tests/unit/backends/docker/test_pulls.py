"""Images are fetched in the background, once each, and a request's error reports the progress."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from executor_server.backends.docker import pulls as module
from executor_server.backends.docker.engine import EngineFailure
from executor_server.backends.docker.pulls import Pulls
from executor_server.core.errors import ImageNotReady
from tests.support.polling import eventually

REFERENCE = "example.org/data:1"


class Registry:
    """Stands in for the Engine: yields some lines, waits for the test, then ends or fails."""

    def __init__(self, *lines: Mapping[str, Any], failure: EngineFailure | None = None) -> None:
        self.go_on = threading.Event()
        self.begun: list[str] = []
        self._lines = lines
        self._failure = failure

    def pull(self, reference: str) -> Iterator[Mapping[str, Any]]:
        self.begun.append(reference)
        yield from self._lines
        self.go_on.wait(10)
        if self._failure is not None:
            raise self._failure


def _pulls(registry: Registry, timeout_s: float = 60.0) -> Pulls:
    return Pulls(registry.pull, timeout_s)


def _refusal(pulls: Pulls) -> ImageNotReady:
    return pulls.fetch("data", REFERENCE)


def _layer(name: str, current: int, total: int) -> dict[str, Any]:
    return {"id": name, "status": "Downloading", "progressDetail": {"current": current, "total": total}}


async def test_the_first_request_begins_a_fetch_and_later_ones_report_its_progress() -> None:
    done = {"id": "a", "status": "Download complete"}
    registry = Registry({"status": "Pulling from data", "id": "1"}, _layer("a", 10, 100), done, _layer("b", 50, 300))
    pulls = _pulls(registry)
    first = _refusal(pulls)
    assert "image 'data' is being fetched" in str(first) and first.retry_after_s is not None
    assert eventually(lambda: "37 %" in str(_refusal(pulls)))  # 150 of 400
    assert registry.begun == [REFERENCE]
    registry.go_on.set()
    await pulls.close()


async def test_an_image_that_was_fetched_and_removed_is_fetched_again() -> None:
    registry = Registry()
    registry.go_on.set()
    pulls = _pulls(registry)
    assert eventually(lambda: "being fetched" in str(_refusal(pulls)) and len(registry.begun) > 1)
    await pulls.close()


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "its registry has no such image"), (None, "log says why"), (500, "log says why")]
)
async def test_a_failure_names_no_host_and_is_not_repeated_at_once(status: int | None, reason: str) -> None:
    registry = Registry(failure=EngineFailure("dial tcp 10.1.2.3:443: connection refused", status))
    registry.go_on.set()
    pulls = _pulls(registry)
    assert eventually(lambda: "could not be fetched" in str(_refusal(pulls)))
    error = _refusal(pulls)
    assert reason in str(error) and "10.1.2.3" not in str(error)
    assert error.retry_after_s is not None and error.retry_after_s > 30
    assert len(registry.begun) == 1
    await pulls.close()


async def test_a_failed_fetch_is_repeated_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FAILURE_KEPT_S", 0.0)
    registry = Registry(failure=EngineFailure("no"))
    registry.go_on.set()
    pulls = _pulls(registry)
    assert eventually(lambda: len(registry.begun) > 1 or not _refusal(pulls))
    await pulls.close()


async def test_a_fetch_that_takes_too_long_is_abandoned() -> None:
    registry = Registry()
    pulls = _pulls(registry, timeout_s=0.01)
    assert eventually(lambda: "took longer than 0.01 s" in str(_refusal(pulls)))
    registry.go_on.set()
    await pulls.close()


async def test_the_number_of_concurrent_fetches_is_limited() -> None:
    registry = Registry()
    pulls = _pulls(registry)
    error = [str(pulls.fetch(f"image{number}", f"example.org/{number}")) for number in range(5)]
    assert ["waits for others" in text for text in error] == [False] * 4 + [True]
    registry.go_on.set()
    await pulls.close()
