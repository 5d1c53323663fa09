"""Integrations of agent frameworks: each framework's own suite from its wheel, and agents with scripted models.

Where a framework is not installed, its tests are skipped; `nox -s integrations` runs each in an environment of its own.
EXECUTOR_TEST_BACKEND and EXECUTOR_TEST_FLEET choose what the sandboxes run on. integrations.toml lists the versions and
the suites' exceptions.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.backend_daemon import daemon_on
from tests.support.daemon import Daemon
from tests.support.replayed import POLICY, check_replays, seen_in

_TABLE = Path(__file__).parent / "integrations.toml"


def _wheel(module: str) -> str:
    return module.partition(".")[0]


def _installed() -> list[dict[str, Any]]:
    """The entries of the table whose framework is here, in this version."""
    found = []
    for entry in tomllib.loads(_TABLE.read_text())["integration"]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if importlib.metadata.version(entry["package"]) == entry["version"]:
                found.append(entry)
    return found


SUITES = {_wheel(entry["suite"]["module"]): entry for entry in _installed() if "suite" in entry}
"""By the name of the package that the suite is in: some tests are inherited from another module of it."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "replayed: options of `check_replays` for the fixture `replayed`")


@pytest.fixture(scope="session")
def daemon() -> Iterator[Daemon]:
    """A daemon that the environment names, as it does for users. It records its sessions."""
    backend = os.environ.get("EXECUTOR_TEST_BACKEND", "local")
    with daemon_on(backend, policy=POLICY) as running, pytest.MonkeyPatch.context() as patch:
        patch.setenv("EXECUTOR_ADDRESS", running.address)
        patch.setenv("EXECUTOR_TOKEN", running.token)
        yield running


@pytest.fixture
def replayed(daemon: Daemon, request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs the sessions of a test again at its end. A mark of this name has options of `check_replays`."""
    mark = request.node.get_closest_marker("replayed")
    with daemon.client() as client:
        seen = seen_in(client)
        yield
        check_replays(client, seen, **(mark.kwargs if mark is not None else {}))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expects all tests of a suite to be there, and its exceptions to fail."""
    for wheel, entry in SUITES.items():
        found: list[Any] = [item for item in items if _wheel_of(item) == wheel]
        exceptions = {each["test"]: each["reason"] for each in entry.get("exceptions", ())}
        for item in found:
            if item.originalname in exceptions:
                item.add_marker(pytest.mark.xfail(reason=exceptions[item.originalname], strict=True))
        tests = entry["suite"]["tests"]
        if found and (len(found) != tests or not exceptions.keys() <= {item.originalname for item in found}):
            raise pytest.UsageError(
                f"{wheel} has {len(found)} tests; {_TABLE.name} says {tests}, or names a missing one"
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A suite's test that skips itself has shown nothing: it counts as failed."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and _wheel_of(item) in SUITES:
        report.outcome = "failed"
    return report


def _wheel_of(item: pytest.Item) -> str:
    return _wheel(getattr(getattr(item, "function", None), "__module__", ""))
