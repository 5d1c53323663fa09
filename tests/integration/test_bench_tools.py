"""The processes that measure for `make bench-compare` and `make bench-peers`, and one comparison from start to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.line_process import LineProcess, WorkerFailure

ROOT = Path(__file__).resolve().parents[2]
_ECHOES = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request == "die":
        sys.exit("it was asked to")
    print(json.dumps({"answer": request["question"]}), flush=True)
"""
_SILENT = "import sys, time; sys.stdin.readline(); time.sleep(600)"
_CHATTERS = "print('no JSON', flush=True); import sys; sys.stdin.read()"
_DIES = "import sys; sys.stdin.readline(); sys.exit('out of luck')"


def process(program: str, directory: Path) -> LineProcess:
    return LineProcess(
        [sys.executable, "-c", program], directory=directory, log=directory / "log", environment=os.environ
    )


def test_a_question_has_its_answer(tmp_path: Path) -> None:
    with process(_ECHOES, tmp_path) as worker:
        assert worker.ask({"question": 1}, 30) == {"answer": 1}
        assert worker.ask({"question": "x" * 300_000}, 30) == {"answer": "x" * 300_000}


def test_a_process_that_is_silent_is_given_up_and_ended(tmp_path: Path) -> None:
    with process(_SILENT, tmp_path) as worker, pytest.raises(WorkerFailure, match="no answer in time"):
        worker.ask({"question": 1}, 0.2)


def test_a_process_that_dies_is_named_with_its_last_words(tmp_path: Path) -> None:
    with process(_DIES, tmp_path) as worker, pytest.raises(WorkerFailure, match="it ended: out of luck"):
        worker.ask({"question": 1}, 30)


def test_an_answer_that_is_no_json_is_refused(tmp_path: Path) -> None:
    with process(_CHATTERS, tmp_path) as worker, pytest.raises(WorkerFailure, match="not JSON"):
        worker.ask({"question": 1}, 30)


def _compared(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.compare", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


def test_a_commit_that_is_not_here_is_no_failure() -> None:
    done = _compared("0" * 40, "--quick")
    assert done.returncode == 0
    assert f"nothing to compare with: there is no commit {'0' * 40} here" in done.stdout


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="these are no work tree's files")
def test_a_commit_beside_itself_is_compared_and_nothing_is_left() -> None:
    done = _compared("HEAD", "--quick", "--only", "execute", "--only", "memory", "--rounds", "6", "--markdown")
    assert done.returncode == 0, done.stderr
    assert "| execute 1+1, Unix socket |" in done.stdout
    assert "| idle session |" in done.stdout
    assert "not compared" not in done.stdout
