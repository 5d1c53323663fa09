"""The host is swept at intervals, also after failures, and never after the sweeper was closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from structlog.testing import capture_logs

from executor_server.backends.host_sweeper import HostSweeper
from executor_server.core.errors import SandboxFailure
from tests.support.fake_backend import FakeBackend
from tests.support.polling import eventually_async


class Backend(FakeBackend):
    """Each sweep calls the next function of `script`; after the last, nothing is found."""

    def __init__(self, directory: Path, *script: Callable[[], int]) -> None:
        super().__init__(directory)
        self.script = list(script)
        self.sweeps = 0

    async def sweep(self) -> int:
        self.sweeps += 1
        return self.script.pop(0)() if self.script else 0


def fail() -> int:
    raise SandboxFailure("the host does not answer")


def break_down() -> int:
    raise ValueError("a bug")


async def test_it_sweeps_again_and_again_and_logs_the_count(tmp_path: Path) -> None:
    backend = Backend(tmp_path, lambda: 0, lambda: 3)
    sweeper = HostSweeper(backend, 0.001)
    with capture_logs() as logs:
        await sweeper.start()
        assert await eventually_async(lambda: backend.sweeps >= 4)
        await sweeper.close()
    assert logs == [{"event": "host_swept", "found": 3, "log_level": "warning"}]


async def test_a_failure_delays_the_next_sweep_and_does_not_end_the_sweeping(tmp_path: Path) -> None:
    backend = Backend(tmp_path, fail, break_down, fail, lambda: 1, fail)
    sweeper = HostSweeper(backend, 0.001)
    with capture_logs() as logs:
        await sweeper.start()
        assert await eventually_async(lambda: backend.sweeps >= 6)
        await sweeper.close()
    assert [(entry["event"], entry.get("retry_after_s")) for entry in logs] == [
        ("host_sweep_failed", 0.002),
        ("host_sweep_broke", 0.004),
        ("host_sweep_failed", 0.008),
        ("host_swept", None),
        ("host_sweep_failed", 0.002),
    ]


async def test_it_ends_in_the_middle_of_a_sweep(tmp_path: Path) -> None:
    backend = Backend(tmp_path)
    begun = asyncio.Event()

    async def hang() -> int:
        begun.set()
        await asyncio.Event().wait()
        return 0

    backend.sweep = hang  # type: ignore[method-assign]
    sweeper = HostSweeper(backend, 0.001)
    await sweeper.start()
    await asyncio.wait_for(begun.wait(), 10.0)
    await sweeper.close()
    await sweeper.close()
    assert len(asyncio.all_tasks()) == 1
