"""Wheels that attack: while they are unpacked, installed, and imported for the first time.

Each attack is tried next to an environment of another tenant. Afterwards that environment is byte for byte as it was,
nothing has appeared outside of the directories of builds, and no process or sandbox is left. After all attacks, an
environment that is built again from the cached wheels is as it was, too.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from executor_server.core import EnvironmentFailed, ImageNotReady
from tests.support.backends import require
from tests.support.internet.world import Internet
from tests.support.package_builder import MIB, Building, Made, building
from tests.support.package_index import hostile
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel
from tests.support.rounds import usual

BACKENDS = ["local", "docker"]
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def index(internet: Internet) -> PackageIndex:
    index = internet.package_index()
    files = {
        "victim/__init__.py": "VERSION = 'honest'\n",
        "victim/data.txt": "honest",
        "victim/more.txt": "honest",
        "victim/other.txt": "honest",
        "bin/victim-file": "#!/bin/sh\necho honest\n",
    }
    index.add(make_wheel("victim", files=files, scripts={"victim-tool": "victim:main"}))
    index.add(hostile.overwriting("victim"))
    index.add(make_wheel("same_script", scripts={"victim-file": "same_script:main"}))
    return index


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=BACKENDS)
async def made_by(request: pytest.FixtureRequest, internet: Internet, index: PackageIndex) -> AsyncIterator[Building]:
    require(request.param)
    async with building(internet, index, backend=request.param, max_entries=20_000, first_import_time_s=6.0) as ready:
        yield ready


# The installer refuses an archive on each backend alike; what a backend's own walls refuse, the test without this has on both.
local_first = pytest.mark.parametrize("made_by", usual(BACKENDS, but=("docker",)), indirect=True, scope="module")


class Witness:
    """Another tenant's environment, which all attacks are tried beside, and places of this host that no build may touch."""

    def __init__(self, building: Building, made: Made) -> None:
        self._building = building
        self._made = made
        self._files = made.files
        self._places = self._around()

    def _around(self) -> dict[str, list[str]]:
        root = self._building.places.root
        places = (root, root.parent, root / "programs", root.parent.parent, Path(tempfile.gettempdir()))
        return {
            str(place): sorted(path.name for path in place.iterdir() if hostile.OUTSIDE in path.name)
            for place in places
        }

    def assert_untouched(self) -> None:
        assert self._made.files == self._files, "another tenant's environment was changed"
        assert self._around() == self._places, "something was written outside"
        assert self._building.existing() == [], "a build sandbox was left"
        assert self._building.left == [], "a directory was left"

    async def assert_cache_untouched(self) -> None:
        again = await self._building.build("victim")
        assert again.files.keys() == self._files.keys(), "the cache was changed"
        for name in ("victim/__init__.py", "victim/data.txt", "bin/victim-file", "bin/victim-tool"):
            assert (again.site / name).read_bytes() == (self._made.site / name).read_bytes(), "the cache was changed"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def witness(made_by: Building) -> AsyncIterator[Witness]:
    witness = Witness(made_by, await made_by.build("victim"))
    yield witness
    await witness.assert_cache_untouched()


def outside(made: Made) -> list[Path]:
    """Files of an environment that should not be there."""
    return [path for path in made.directory.rglob(hostile.OUTSIDE) if made.site not in path.parents]


@local_first
@pytest.mark.parametrize(
    "name",
    usual(sorted(hostile.ARCHIVES), but=("backslashes", "climbing_data", "lying_archive", "odd_names")),
)
async def test_an_archive_that_leads_elsewhere_is_refused_or_harmless(
    made_by: Building, index: PackageIndex, witness: Witness, name: str
) -> None:
    index.add(hostile.ARCHIVES[name](), metadata=None)
    try:
        made = await made_by.build(name.replace("_", "-"))
    except (EnvironmentFailed, ImageNotReady) as refused:
        assert "/run" not in str(refused) and index.host not in str(refused)
    else:
        assert not outside(made)
        assert not [path for path in made.site.rglob("*") if path.is_symlink() or path.stat().st_mode & 0o7022]
    witness.assert_untouched()


@local_first
async def test_a_script_named_like_anothers_file_is_refused(
    made_by: Building, index: PackageIndex, witness: Witness
) -> None:
    index.add(hostile.climbing_script("victim"))
    with pytest.raises(EnvironmentFailed, match="scripts directory"):
        await made_by.build("climbing-script", "victim")
    witness.assert_untouched()


@local_first
@pytest.mark.parametrize(
    ("project", "file"), [("overwriting", "'bin/victim-tool'"), ("same-script", "'bin/victim-file'")]
)
async def test_a_package_with_anothers_files_is_refused_by_name(
    made_by: Building, witness: Witness, project: str, file: str
) -> None:
    """uv installs them at the same time: which of the two has the last word would be left to chance."""
    name = project.replace("-", "_")
    with pytest.raises(EnvironmentFailed, match=rf"{name} 1\.0 and victim 1\.0, have the file {file}"):
        await made_by.build(project, "victim")
    witness.assert_untouched()


@local_first
@pytest.mark.parametrize("files", usual([1, 24], but=(1,)))
async def test_a_bomb_ends_at_the_bytes_of_an_environment(
    made_by: Building, index: PackageIndex, witness: Witness, files: int
) -> None:
    def disk_bytes() -> int:
        return sum(path.lstat().st_blocks * 512 for path in made_by.places.root.rglob("*"))

    before = disk_bytes()
    index.add(hostile.bomb(f"bomb{files}", 768 * MIB // files, files))
    with pytest.raises((EnvironmentFailed, ImageNotReady)) as refused:
        await made_by.build(f"bomb{files}", max_bytes=64 * MIB)
    assert "/run" not in str(refused.value)
    witness.assert_untouched()
    assert disk_bytes() - before < 256 * MIB


@local_first
async def test_a_crowd_of_files_ends_at_those_of_an_environment(
    made_by: Building, index: PackageIndex, witness: Witness
) -> None:
    index.add(hostile.crowd(100_000))
    with pytest.raises(EnvironmentFailed, match=r"files"):
        await made_by.build("crowd")
    witness.assert_untouched()


@local_first
async def test_code_of_a_pth_file_runs_in_sandboxes_only(
    made_by: Building, index: PackageIndex, witness: Witness
) -> None:
    index.add(hostile.starting())
    made = await made_by.build("starting")
    assert (made.site / "starting.pth").exists()
    assert not Path(hostile.MARK).exists(), "it ran on the host"
    witness.assert_untouched()


@local_first
@pytest.mark.parametrize(
    "name", usual(sorted(hostile.IMPORTS), but=("import_takes_memory", "import_hangs", "import_prints"))
)
async def test_a_first_import_that_attacks_costs_its_own_bytecode_at_most(
    internet: Internet, made_by: Building, index: PackageIndex, witness: Witness, name: str
) -> None:
    index.add(hostile.importing(name, hostile.IMPORTS[name]))
    made = await made_by.build(name.replace("_", "-"), "victim")
    assert made.built.modules == tuple(sorted((name, "victim")))
    source = (made.site / name / "__init__.py").read_text()
    assert source == hostile.IMPORTS[name], "it wrote to its environment"
    assert sorted(path.name for path in made.site.iterdir() if path.name == hostile.OUTSIDE) == []
    own = [entry for entry in made.bytecode if not entry.startswith((name, "victim"))]
    assert own == [], "bytecode of something else appeared"
    witness.assert_untouched()


async def test_bytecode_that_a_first_import_forges_stays_in_its_own_environment(
    made_by: Building, index: PackageIndex, witness: Witness
) -> None:
    forging = """
import os, struct, sys, importlib.util
site = "/run/executor/environment/site"
top = sys.pycache_prefix + site
status = os.stat(site + "/victim/__init__.py")
head = struct.pack("<4sIII", importlib.util.MAGIC_NUMBER, 0, int(status.st_mtime), status.st_size)
tag = sys.implementation.cache_tag
for name in ("victim/__init__", "../../../outside", "absent/module", "forging/__init__"):
    path = f"{top}/{name}.{tag}.pyc"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(head + b"forged")
os.symlink("/etc/passwd", f"{top}/victim/link.{tag}.pyc")
"""
    index.add(hostile.importing("forging", forging))
    made = await made_by.build("forging", "victim")
    assert all(entry.startswith(("forging/__pycache__/", "victim/__pycache__/")) for entry in made.bytecode)
    witness.assert_untouched()
