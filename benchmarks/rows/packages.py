"""Environments of packages: an existing one compared with none, building one of cached wheels, and imports.

The index is the tests' own. Its numpy and pandas are those of the Python that runs the benchmarks, packed again as
wheels, so that the environment and the image have the same files.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.bench import Bench, Served, serving
from benchmarks.figures import AtMost, AtMostMore, AtMostTimes, Figure, Reference, in_turns, timed
from executor_client import Session
from tests.support.internet.world import open_internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel

_PROJECTS = ("numpy", "pandas", "python-dateutil")
_IMPORTS = ("numpy.*", "pandas.*")
_BUILDS = 5
_ROUNDS = 20
_numbers = itertools.count(1)


def local(_bench: Bench) -> Iterator[Figure]:
    """All figures, on the local backend."""
    with _served() as (served, index):
        yield from _building(served, index)
        yield from _beside_none(served)
        yield from _imports(served)


@contextmanager
def _served() -> Iterator[tuple[Served, PackageIndex]]:
    """A daemon, and its index."""
    with open_internet() as internet, tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        index = internet.package_index()
        for project in _PROJECTS:
            index.add(_packed_again(project))
        policy = Path(directory) / "policy.toml"
        policy.write_text('default = "open"\n[profiles.open]\nimports.allowed = ["*"]\npackages.allowed = ["*"]\n')
        settings = f"""
            policy.file = {json.dumps(str(policy))}
            {internet.config()}
            [environments]
            index_url = {json.dumps(index.url)}
            index_hosts = [{json.dumps(index.host)}, {json.dumps(index.files_host)}]
            """
        with serving("local", settings) as served:
            yield served, index


def _packed_again(project: str) -> tuple[str, bytes]:
    """Returns the wheel of a project that is installed here; it requires only projects that the index has."""
    found = importlib.metadata.distribution(project)
    files: dict[str, str | bytes] = {}
    for file in found.files or ():
        path = Path(str(file.locate()))
        if ".." not in file.parts and ".dist-info" not in str(file) and path.suffix != ".pyc" and path.is_file():
            files[str(file)] = path.read_bytes()
    requires = ("numpy", "python-dateutil") if project == "pandas" else ()
    return make_wheel(project, found.version, files, requires=requires)


def _small(index: PackageIndex) -> str:
    """Adds another small package to the index; an environment with it is a new one."""
    name = f"pebble{next(_numbers)}"
    index.add(make_wheel(name))
    return name


def _building(served: Served, index: PackageIndex) -> Iterator[Figure]:
    def build() -> float:
        packages = ["numpy", "pandas", _small(index)]
        return timed(lambda: served.client.prepare_environment(packages)) / 1000

    (built_s,) = in_turns(_BUILDS, build, warm_up=1)  # the first fills the cache
    yield Figure("environment of numpy + pandas, cached wheels", "s", built_s, aim=AtMost(6))


def _beside_none(served: Served) -> Iterator[Figure]:
    packages = ["numpy", "pandas"]
    served.client.prepare_environment(packages)
    ours, none = in_turns(_ROUNDS, lambda: _created(served, packages), lambda: _created(served, []))
    yield Figure("cold session, environment there", "ms", ours, Reference("no packages", none), AtMostMore(5))


def _created(served: Served, packages: list[str]) -> float:
    sessions: list[Session] = []
    try:
        return timed(lambda: sessions.append(served.cold_session(packages=packages)))
    finally:
        for session in sessions:
            session.close()


def _imports(served: Served) -> Iterator[Figure]:
    ours, baked = in_turns(
        _ROUNDS // 2, lambda: _first_import(served, ["numpy", "pandas"]), lambda: _first_import(served, []), warm_up=1
    )
    yield Figure("first import numpy, pandas", "ms", ours, Reference("in the image", baked), AtMostTimes(1.2))


def _first_import(served: Served, packages: list[str]) -> float:
    with served.client.create_session(authorized_imports=_IMPORTS, packages=packages) as session:
        took_ms = timed(lambda: session.execute("import numpy, pandas").raise_for_outcome())
        inside = str(session.evaluate("numpy.__file__")).startswith("/run/executor/environment")
        assert inside == bool(packages), "it is measured where it is said to be"
        return took_ms
