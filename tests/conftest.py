"""The ground that all tests stand on: a directory of the run's own, and nothing left behind after any test."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.support import rounds
from tests.support.leftovers import Snapshot, leftovers_since, snapshot
from tests.support.reaper import WORKER, run_directory

if TYPE_CHECKING:
    from tests.support.internet.world import Internet

# Here, and not in a hook: this is the last moment at which the process has one thread and nothing open.
RUN_DIRECTORY = run_directory()
CACHE_DIRECTORY = Path(__file__).resolve().parents[1] / ".cache" / "tests"

# The modules of ten thousand tests are no garbage; looking for some in between would take a fifth of the collection.
gc.disable()

_at_start = pytest.StashKey[Snapshot]()
_left_in_workers: list[str] = []
# The slowest folders begin first, so that small files fill the end of the run.
_SLOWEST_FIRST = ("chaos", "security", "features", "integration", "contract", "rpc", "unit")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run all rounds and cases (tests/support/rounds.py)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # a short name: the path of a socket has at most 107 bytes
        config.option.basetemp = Path(config.option.basetemp).with_name(worker.removeprefix("gw"))
    # pytest's own directories stay where people look for them.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    _enter(RUN_DIRECTORY)
    # The packed guest and the like, by content: all workers and later runs of this clone share them.
    os.environ["XDG_CACHE_HOME"] = str(CACHE_DIRECTORY)
    for variable in ("EXECUTOR_ADDRESS", "EXECUTOR_TOKEN", "EXECUTOR_CONFIG", "EXECUTOR_STATE_DIR"):
        os.environ.pop(variable, None)
    # A daemon that may not keep its bytecode compiles 300 modules at each start, which costs more than the rest of it;
    # a worker that may not rewrites the assertions of all tests, half of its collection.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    if config.getoption("all"):
        os.environ[rounds.VARIABLE] = "all"
        rounds.ALL = True
    # A loaded machine generates examples slowly, which says nothing about a test.
    slow = [hypothesis.HealthCheck.too_slow]
    examples = rounds.rounds(100, 40)
    hypothesis.settings.register_profile("ours", suppress_health_check=slow, deadline=None, max_examples=examples)
    hypothesis.settings.load_profile("ours")
    # A shell starts what runs in its background with this one ignored, and that would go on to all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_at_start] = snapshot(host=True)
    if workers := getattr(config.option, "tx", None):
        config.option.tx = [WORKER] * len(workers)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((i for i, name in enumerate(_SLOWEST_FIRST) if name in item.path.parts), 0))
    for item in items:
        if "shared_harness" in getattr(item, "fixturenames", ()):  # its loop is one for the file, as it is
            item.add_marker(pytest.mark.asyncio(loop_scope="module"), append=False)


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection during the tests looks through what was collected here
    gc.enable()


def _enter(run_directory: Path) -> None:
    """All else that asks for a temporary directory gets one that is empty, so that what stays in it is ours; no other
    daemon's state, token or configuration is ever touched."""
    for variable, name in (("TMPDIR", "tmp"), ("XDG_STATE_HOME", "state"), ("XDG_CONFIG_HOME", "config")):
        directory = run_directory / name
        directory.mkdir()
        os.environ[variable] = str(directory)
    tempfile.tempdir = None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Formats a failure without a collection of garbage, for which pytest parses sources.

    Before CPython 3.11.8, a finalizer or another thread that runs in the middle and parses something else has ast.parse
    raise SystemError (python/cpython issue 106905), which would end the run or its worker.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


@pytest.fixture(autouse=True)
def nothing_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a temporary file, a cgroup or a mount behind."""
    before = snapshot(host="unit" not in Path(request.path).parts)
    yield
    left = leftovers_since(before)
    if left:
        pytest.fail("left over after the test:\n  " + "\n  ".join(left), pytrace=False)


@pytest.fixture(scope="session")
def internet() -> Iterator[Internet]:
    """Names, an authority, a name server and servers for tests of the network; skips where it cannot be."""
    from tests.support.internet.world import require_internet  # its servers' library is slow to import

    yield from require_internet()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for the whole run: here the fixtures that tests share have ended too."""
    left = leftovers_since(session.config.stash[_at_start])
    if (worker_output := getattr(session.config, "workeroutput", None)) is not None:
        worker_output["left"] = left
        return
    left += _left_in_workers
    if left:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line("left over after all tests:\n  " + "\n  ".join(left), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_testnodedown(node: Any) -> None:
    _left_in_workers.extend(getattr(node, "workeroutput", {}).get("left", ()))
