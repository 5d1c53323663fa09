"""The contract: the promises of every backend, stated once (promises.py) and tested on each.

A test is collected for every backend and runs on those that keep the promise that it proves, by the table. With
EXECUTOR_TEST_FLEET it runs on the local backend alone, through the front of two nodes (wire.py), where it can (inside.py).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio

from executor_server.backends.base import Backend
from executor_server.core.config.backend_config import LocalImage
from tests.contract import ahead
from tests.contract.harness import Harness, images_examined_once, open_harness
from tests.contract.inside import reason_of
from tests.contract.marks import backend_of, belongs, repeats
from tests.contract.probes import Probe, probe_of
from tests.contract.promises import BACKENDS
from tests.contract.wire import Front, front_of_two, open_wire_harness
from tests.support import fleet_daemon, rounds
from tests.support.backends import require
from tests.support.interpreters import pythons


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "promise(*ids): the promises that a test proves")
    config.addinivalue_line(
        "markers", "instead(*ids): promises that are not kept; the test proves what is done instead"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    ours = [item for item in items if str(item.path).startswith(here) and isinstance(item, pytest.Function)]
    elsewhere = [item for item in ours if not belongs(item)]
    if fleet_daemon.wanted():
        elsewhere += _off_the_fleet(item for item in ours if belongs(item))
    if not rounds.ALL:
        asked = set(config.args)
        run = [item for item in ours if belongs(item)]
        elsewhere += [item for item in repeats(run) if item.nodeid not in asked]
    if elsewhere:
        config.hook.pytest_deselected(items=elsewhere)
        dropped = set(elsewhere)
        items[:] = [item for item in items if item not in dropped]


def _off_the_fleet(items: Iterable[pytest.Function]) -> Iterator[pytest.Function]:
    """Yields the tests that are about no session on the local backend, and marks those that no front can have."""
    for item in items:
        if backend_of(item) != "local" or item.path.name == "test_promises.py":
            yield item
        elif reason := reason_of(item):
            item.add_marker(pytest.mark.skip(reason=f"not through a front: {reason}"))


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a short name, for the paths of sockets, that a sandbox's user may pass through."""
    made = Path(tempfile.mkdtemp(prefix="c-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture(params=BACKENDS)
async def probe(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Probe]:
    """A host for sandboxes, with means to look at it and change it from outside of the backend."""
    require(request.param)
    async with probe_of(request.param, directory) as ready:
        yield ready


@pytest.fixture
async def backend(probe: Probe) -> AsyncIterator[Backend]:
    """A daemon's backend, which is closed at the end."""
    with images_examined_once():
        backend = probe.backend()
        await backend.start()
        await backend.adopt(())
        yield backend
        await backend.close()


@pytest.fixture(scope="session")
def python_with_modules() -> Iterator[Path]:
    """An interpreter with modules for images that import some ahead."""
    with ahead.python_with_modules() as python:
        yield python


@pytest.fixture(scope="session")
def front(request: pytest.FixtureRequest) -> Iterator[Front | None]:
    """The front of two nodes that all tests share, in a run of the tests that is for a fleet.

    They have an image of each Python of this machine, and those of tests that import modules ahead.
    """
    if not fleet_daemon.wanted():
        yield None
        return
    with_modules: Path = request.getfixturevalue("python_with_modules")
    images = {"base": LocalImage(python=Path(sys.executable))}
    images |= {f"py{version}": LocalImage(python=python) for version, python in pythons().items()}
    for image, modules in ahead.AHEAD.items():
        images[image] = LocalImage(python=ahead.python_of(image, with_modules), preload=modules)
    with front_of_two(images, request.getfixturevalue("internet")) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def shared_harness(request: pytest.FixtureRequest, front: Front | None) -> AsyncIterator[Harness]:
    """A harness for all tests of a file on one backend; it must know of no sandbox when the last has ended."""
    require(request.param)
    if front is not None:
        async with open_wire_harness(front) as wire:
            yield cast("Harness", wire)
        return
    async with open_harness(request.param) as ready:
        yield ready
        assert await ready.probe.existing() == set()


@pytest_asyncio.fixture(loop_scope="module")
async def harness(shared_harness: Harness) -> AsyncIterator[Harness]:
    """Sessions on a backend, without the wire: in this process, with the real guest in a real sandbox.

    The backend and the manager are shared with other tests, the sessions are the test's own. One that restarts or kills
    a backend takes `probe`.
    """
    yield shared_harness
    await shared_harness.end_sessions()
