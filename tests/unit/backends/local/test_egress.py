"""A sandbox with a network has another /etc and more variables than others, and no mount more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.backends.guest_archive import GuestArchive
from executor_server.backends.local.bubblewrap import Bwrap
from executor_server.backends.local.cgroups import NoCgroups
from executor_server.backends.local.egress import EgressFiles
from executor_server.backends.local.images import Image
from executor_server.backends.local.layout import Layout, build_etc
from executor_server.backends.local.resources import Resources
from executor_server.backends.settings import CA_BUNDLE, egress_environment
from executor_server.core.errors import SandboxFailure
from tests.support.fake_backend import SPEC

NETWORK = replace(SPEC, egress=True)
IMAGE = Image("base", Path("/usr/bin/python3"), (3, 11), (), (), (), (), "abc")


@pytest.fixture
def resources(tmp_path: Path) -> Resources:
    layout = Layout(build_etc(tmp_path), tmp_path / "bin", GuestArchive(tmp_path / "guest.pyz", "1"))
    return Resources(Bwrap(Path("/usr/bin/bwrap"), "1"), b"", layout, {}, NoCgroups("none", ""))


def bundle(directory: Path, text: str = "authorities") -> Path:
    path = directory / f"{text}.pem"
    path.write_text(text)
    return path


def inside(resources: Resources) -> Path:
    return resources.layout.etc / Path(CA_BUNDLE).relative_to("/etc")


async def test_the_authorities_are_part_of_another_etc(resources: Resources, tmp_path: Path) -> None:
    files = EgressFiles(lambda: bundle(tmp_path))
    added = await files.added_to(resources)
    assert inside(added).read_text() == "authorities" and inside(added).stat().st_mode & 0o777 == 0o644
    assert not inside(resources).exists()
    assert (await files.added_to(resources)).layout.etc == added.layout.etc


async def test_other_authorities_are_part_of_yet_another(resources: Resources, tmp_path: Path) -> None:
    paths = iter([bundle(tmp_path, "old"), bundle(tmp_path, "new")])
    files = EgressFiles(lambda: next(paths))
    old, new = await files.added_to(resources), await files.added_to(resources)
    assert (inside(old).read_text(), inside(new).read_text()) == ("old", "new"), (
        "sandboxes may have the old one mounted"
    )


async def test_a_network_costs_no_mount(resources: Resources, tmp_path: Path) -> None:
    added = await EgressFiles(lambda: bundle(tmp_path)).added_to(resources)
    plain, network = resources.layout.arguments(IMAGE, SPEC), added.layout.arguments(IMAGE, NETWORK)
    variables = [part for name, value in egress_environment().items() for part in ("--setenv", name, value)]
    assert len(network) == len(plain) + len(variables)
    assert network.count("--ro-bind") == plain.count("--ro-bind")
    assert not [part for part in plain if "proxy" in part.lower() or CA_BUNDLE in part]


async def test_without_a_proxy_or_its_file_there_is_no_network(resources: Resources, tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match="no egress proxy"):
        await EgressFiles(None).added_to(resources)
    with pytest.raises(SandboxFailure, match="can't be copied"):
        await EgressFiles(lambda: tmp_path / "none.pem").added_to(resources)
