"""The ground that all tests stand on: a directory of the run's own, and nothing left behind after any test."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.keeper import fork_keeper
from tests.support.leftovers import Snapshot, leftovers_since, snapshot

# Here, and not in a hook: this is the last moment at which the process has one thread and nothing open.
RUN_DIRECTORY = fork_keeper()

_at_start = pytest.StashKey[Snapshot]()


def pytest_configure(config: pytest.Config) -> None:
    # pytest's own directories stay where people look for them. All else that asks for a temporary directory gets one
    # that is empty, so that what stays in it is ours; nobody's own daemon, token or configuration is ever touched.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    for variable, name in (("TMPDIR", "tmp"), ("XDG_STATE_HOME", "state"), ("XDG_CONFIG_HOME", "config")):
        directory = RUN_DIRECTORY / name
        directory.mkdir()
        os.environ[variable] = str(directory)
    tempfile.tempdir = None
    for variable in ("EXECUTOR_ADDRESS", "EXECUTOR_TOKEN", "EXECUTOR_CONFIG", "EXECUTOR_STATE_DIR"):
        os.environ.pop(variable, None)
    # A shell starts what runs in its background with this one ignored, and that would go on to all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[_at_start] = snapshot(host=True)


@pytest.fixture(autouse=True)
def nothing_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a process, a temporary file, a cgroup or a mount behind."""
    before = snapshot(host="unit" not in Path(request.path).parts)
    yield
    left = leftovers_since(before)
    if left:
        pytest.fail("left over after the test:\n  " + "\n  ".join(left), pytrace=False)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for the whole run: here the fixtures that tests share have ended too."""
    left = leftovers_since(session.config.stash[_at_start])
    if left:
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter.ensure_newline()
        reporter.write_line("left over after all tests:\n  " + "\n  ".join(left), red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
