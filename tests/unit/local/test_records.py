"""What is swept, and what only looks like it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.backends.local.records import read_record, sweep, write_record


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


@pytest.fixture
def sandbox(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> Path:
    """The directory of a sandbox whose first process is the sleeper."""
    directory = tmp_path / "ab12"
    directory.mkdir()
    write_record(directory, "ab12", sleeper.pid, None, b"secret")
    return directory


async def _sweep(sandboxes: Path) -> int:
    return await sweep(sandboxes, asyncio.get_running_loop().time() + 10)


async def test_a_recorded_process_is_killed_and_its_directory_removed(
    sandbox: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    assert await _sweep(sandbox.parent) == 1
    assert sleeper.wait() == -9
    assert not sandbox.exists()


@pytest.mark.parametrize("change", [{"start_time": 1}, {"boot_id": "another"}])
async def test_a_process_that_only_has_the_same_number_is_spared(
    sandbox: Path, sleeper: subprocess.Popen[bytes], change: dict[str, object]
) -> None:
    path = sandbox / "record.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    await _sweep(sandbox.parent)
    assert sleeper.poll() is None
    assert not sandbox.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}'])
async def test_a_record_that_is_not_whole_means_that_nothing_ran(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "cd34"
    directory.mkdir()
    (directory / "record.json").write_text(text)
    assert read_record(directory) is None
    assert await _sweep(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


async def test_a_process_that_is_gone_is_no_reason_to_stop(sandbox: Path, sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait()
    assert await _sweep(sandbox.parent) == 1
