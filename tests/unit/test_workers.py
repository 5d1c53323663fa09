"""Several workers run the tests of one run: each test once, whatever becomes of a worker."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import os
from pathlib import Path

from tests.support.workers import Coordinator

def begin(run_directory):
    assert run_directory.is_dir() and not list(run_directory.iterdir())
    return lambda: os.environ.get("LEFT", "").split()

def pytest_configure(config):
    config.pluginmanager.register(Coordinator(3, Path(os.environ["BASE"]), begin))

def pytest_terminal_summary(terminalreporter, config):
    [coordinator] = [each for each in config.pluginmanager.get_plugins() if isinstance(each, Coordinator)]
    for left in coordinator.leftovers:
        terminalreporter.write_line(f"left: {left}")
"""
NOTE = """
import os
from pathlib import Path

import pytest

def note(what):
    with open(os.environ["NOTES"], "a") as file:
        file.write(f"{what} {os.environ['EXECUTOR_TEST_WORKER']}\\n")
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made = tmp_path / "base"
    made.mkdir()
    return made


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def run(tmp_path: Path, base: Path, notes: Path) -> Run:
    """Runs pytest, with workers, on files that are given by their names."""

    def run(*options: str, left: str = "", **files: str) -> subprocess.CompletedProcess[str]:
        place = tmp_path / "tried"
        place.mkdir()
        (place / "conftest.py").write_text(CONFTEST)
        (place / "pytest.ini").write_text("[pytest]\n")
        for name, text in files.items():
            (place / f"test_{name}.py").write_text(NOTE + text)
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(ROOT),
            "BASE": str(base),
            "NOTES": str(notes),
            "LEFT": left,
        }
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
        return subprocess.run(
            command, cwd=place, env=environment, capture_output=True, text=True, timeout=60, check=False
        )

    return run


MANY = "@pytest.mark.parametrize('number', range(40))\ndef test_{0}(number):\n    note(f'{0}-{{number}}')\n"


def test_each_test_runs_once_and_more_than_one_worker_runs_them(run: Run, notes: Path, base: Path) -> None:
    done = run(a=MANY.format("a"), b=MANY.format("b"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "80 passed" in done.stdout
    noted = [line.split() for line in notes.read_text().splitlines()]
    assert sorted(test for test, _ in noted) == sorted(f"{name}-{number}" for name in "ab" for number in range(40))
    assert list(base.iterdir()) == [], "the workers' run directories"


def test_a_failure_is_reported_with_what_it_printed_and_fails_the_run(run: Run) -> None:
    done = run(a="def test_a():\n    print('told')\n    assert 1 + 1 == 3\n" + MANY.format("b"))
    assert done.returncode == 1
    assert re.search(r"1 failed, 40 passed", done.stdout)
    assert "assert (1 + 1) == 3" in done.stdout
    assert "told" in done.stdout


def test_a_skipped_test_is_listed_with_its_reason(run: Run) -> None:
    done = run("-ra", a="@pytest.mark.skip(reason='not here')\ndef test_a():\n    pass\n" + MANY.format("b"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "40 passed, 1 skipped" in done.stdout
    assert re.search(r"SKIPPED \[1\] test_a\.py(:\d+)?: not here", done.stdout)


def test_a_test_whose_worker_dies_fails_and_the_others_run(run: Run) -> None:
    done = run(a=MANY.format("a") + "def test_dies():\n    os._exit(3)\n" + MANY.format("b"))
    assert done.returncode == 1
    assert "1 failed, 80 passed" in done.stdout
    assert re.search(r"worker \d ended with status 3 while it ran this test", done.stdout)


def test_a_shared_fixture_is_made_once_for_each_of_its_parameters(run: Run, notes: Path) -> None:
    shared = """
@pytest.fixture(scope="module", params=["x", "y"])
def shared(request):
    note(f"made-{request.param}")
    return request.param

@pytest.mark.parametrize("number", range(30))
def test_it(shared, number):
    note(f"used-{shared}")
"""
    done = run(a=shared, b=MANY.format("b"))
    assert done.returncode == 0, done.stdout + done.stderr
    noted = [line.split() for line in notes.read_text().splitlines()]
    for param in "xy":
        assert [what for what, _ in noted].count(f"made-{param}") == 1
        assert len({worker for what, worker in noted if what.endswith(f"-{param}") and len(what) <= 6}) == 1


def test_what_a_worker_leaves_over_is_reported(run: Run) -> None:
    done = run(left="something", a=MANY.format("a"))
    assert "left: something" in done.stdout


def test_after_the_first_failure_no_more_is_begun_when_it_is_asked_for(run: Run) -> None:
    failing = "import time\n\ndef test_a():\n    assert False\n" + "\n".join(
        f"def test_later_{number}():\n    time.sleep(0.05)\n" for number in range(100)
    )
    done = run("-x", a=failing)
    assert done.returncode == 1
    assert "stopping after 1 failures" in done.stdout
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is None or int(counted[1]) < 100


def test_a_failure_can_be_shown_whatever_a_collection_of_garbage_runs(request: pytest.FixtureRequest) -> None:
    """CPython 3.11.7 loses count of its depth where one parse interrupts another."""

    def fail() -> None:
        raise ValueError("shown")

    def parse(phase: str, info: dict[str, int]) -> None:
        ast.parse("a + b")

    call = pytest.CallInfo.from_call(fail, "call")
    threshold = gc.get_threshold()
    gc.callbacks.append(parse)
    gc.set_threshold(10)
    try:
        report = request.node.ihook.pytest_runtest_makereport(item=request.node, call=call)
    finally:
        gc.callbacks.remove(parse)
        gc.set_threshold(*threshold)
    assert 'raise ValueError("shown")' in report.longreprtext
