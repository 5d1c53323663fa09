"""Environments are made by uv in build sandboxes, of an index of the tests' own: what comes out, and what is said when not."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from executor_server.backends.environments import BuildMounts
from executor_server.core import EnvironmentFailed, ImageNotReady, NetworkRules, NetworkSecret, SandboxSpec
from executor_server.packages.build_sandbox import Order, open_build_sandbox
from tests.support.backends import require
from tests.support.internet.world import Internet
from tests.support.package_builder import Building, building
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_sdist, make_wheel
from tests.support.polling import eventually_async
from tests.support.rounds import usual

SPEC = SandboxSpec("base", 512 * 2**20, 64, 64 * 2**20, 60.0)


@pytest.fixture
def index(internet: Internet) -> PackageIndex:
    """An index with a few honest packages."""
    index = internet.package_index()
    index.add(
        make_wheel(
            "alpha",
            files={
                "alpha/__init__.py": "from alpha.words import WORD\nimport beta\n",
                "alpha/words.py": "WORD = 'hello'\n",
            },
            requires=["beta>=1"],
            scripts={"alpha-tool": "alpha.words:main"},
        )
    )
    index.add(make_wheel("beta", "1.0"))
    index.add(make_wheel("beta", "2.0"))
    return index


@pytest_asyncio.fixture
async def made_by(internet: Internet, index: PackageIndex) -> AsyncIterator[Building]:
    require("local")
    async with building(internet, index) as ready:
        yield ready


async def test_packages_are_resolved_locked_installed_and_compiled(made_by: Building, index: PackageIndex) -> None:
    made = await made_by.build("alpha>=1")
    assert made.lock.pins == made.built.pins == ("alpha==1.0", "beta==2.0")
    assert made.built.modules == ("alpha", "beta")
    assert made.progress[0] == "resolving" and made.progress[-1].startswith("first import")
    assert "installing, 0 of 2 packages" in made.progress
    names = {name.rpartition("/")[2].partition(".")[0] for name in made.bytecode}
    assert names == {"__init__", "words", "beta"}
    assert (made.site / "bin/alpha-tool").read_text().startswith("#!/usr/bin/env python3\n")
    assert made_by.left == []
    index.forget_requests()
    again = await made_by.make(made.lock, "alpha>=1")
    assert index.requests == [], "the index was asked again"
    assert again.built == made.built
    assert (again.site / "beta.py").stat().st_ino != (made.site / "beta.py").stat().st_ino, "they share a file"


async def test_what_is_made_works_in_a_sandbox(made_by: Building, index: PackageIndex) -> None:
    index.add(
        make_wheel(
            "tool",
            files={"tool.py": "import alpha, json\ndef main():\n    print(json.dumps({'said': alpha.WORD}))\n"},
            requires=["alpha"],
            scripts={"tool-run": "tool:main"},
        )
    )
    made = await made_by.build("tool")
    said = await made_by.run(
        made,
        """
import subprocess, sys, os
environment = {**os.environ, "PYTHONPATH": "/run/executor/environment/site"}
print(subprocess.run(["/run/executor/environment/site/bin/tool-run"], env=environment, text=True,
                     stdout=subprocess.PIPE).stdout)
""",
    )
    assert said == [{"said": "hello"}]


@pytest.mark.parametrize(
    ("requirements", "words"),
    [
        (["alpha>=2"], ["alpha", "2"]),
        (["beta==1.0", "needs-two"], ["beta==1.0", "beta>=2"]),
        (["absent"], ["absent was not found"]),
        (["source"], ["source", "wheel"]),
    ],
    ids=lambda value: "-".join(value),
)
async def test_what_cannot_be_had_is_explained_by_uv(
    made_by: Building, index: PackageIndex, requirements: list[str], words: list[str]
) -> None:
    index.add(make_wheel("needs-two", requires=["beta>=2"]))
    index.add(make_sdist("source"))
    with pytest.raises(EnvironmentFailed) as failed:
        await made_by.build(*requirements)
    text = str(failed.value)
    assert all(word in text for word in words), text
    assert index.host not in text and "/run" not in text and len(text) < 2200
    assert not any(request.endswith(".tar.gz") for request in index.requests), "a source was downloaded"
    assert list(made_by.places.staging.iterdir()) == made_by.left == []


async def test_a_version_that_is_too_new_is_not_chosen(made_by: Building, index: PackageIndex) -> None:
    yesterday = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    index.add(make_wheel("beta", "3.0"), upload_time=yesterday)
    assert (await made_by.build("beta", exclude_newer_s=14 * 86_400.0)).built.pins == ("beta==2.0",)
    assert (await made_by.build("beta")).built.pins == ("beta==3.0",)


async def test_a_file_with_another_hash_than_its_page_says_is_refused(made_by: Building, index: PackageIndex) -> None:
    index.add(make_wheel("lied-about"), sha256="0" * 64)
    with pytest.raises(EnvironmentFailed, match="ash mismatch"):
        await made_by.build("lied-about")


async def test_a_file_that_changed_after_the_lock_was_made_is_refused(made_by: Building, index: PackageIndex) -> None:
    release = index.add(make_wheel("changing"))
    index.max_age_s = 0
    spec_lock = await made_by.lock("changing")
    shutil.rmtree(made_by.places.wheels / spec_lock.hashes[0])  # as eviction does
    release.content = make_wheel("changing", files={"changing.py": "HOSTILE = 1\n"})[1]
    with pytest.raises(EnvironmentFailed, match="Hash mismatch"):
        await made_by.make(spec_lock, "changing")


@pytest.mark.parametrize("behaviour", usual(["fails", "garbage"], but=("fails",)))
async def test_an_index_out_of_order_is_no_fault_of_the_packages(
    made_by: Building, index: PackageIndex, behaviour: str
) -> None:
    index.behaviour = behaviour
    with pytest.raises(ImageNotReady) as failed:
        await made_by.build("alpha")
    assert index.host not in str(failed.value)
    if behaviour == "fails":
        assert not isinstance(failed.value, EnvironmentFailed) and failed.value.retry_after_s
    index.behaviour = "answers"
    assert (await made_by.build("beta")).built.pins == ("beta==2.0",)


@pytest.mark.parametrize("behaviour", usual(["short", "missing"], but=("short",)))
async def test_a_file_that_does_not_come_whole_ends_the_build(
    made_by: Building, index: PackageIndex, behaviour: str
) -> None:
    index.add(make_wheel("gamma"), behaviour=behaviour)
    with pytest.raises(ImageNotReady):
        await made_by.build("gamma")
    assert made_by.left == []


@pytest.mark.parametrize("hanging", ["page", "file", "half a file"])
async def test_an_index_that_hangs_costs_the_time_of_a_build(
    internet: Internet, index: PackageIndex, hanging: str
) -> None:
    require("local")
    if hanging == "page":
        index.behaviour = "hangs"
    index.add(make_wheel("gamma"), behaviour={"file": "hangs", "half a file": "stops"}.get(hanging, "whole"))
    async with building(internet, index, build_timeout_s=4.0) as made_by:
        with pytest.raises(ImageNotReady, match="within 4 s") as failed:
            await made_by.build("gamma")
        assert failed.value.retry_after_s


async def test_an_endless_page_ends_with_the_bytes_that_a_build_may_receive(
    internet: Internet, index: PackageIndex
) -> None:
    require("local")
    index.behaviour = "endless"
    rules = NetworkRules((f"{index.host}:443", f"{index.files_host}:443"), max_received_bytes=16 * 2**20)
    async with building(internet, index, network=rules) as made_by:
        with pytest.raises(ImageNotReady):
            await made_by.build("alpha")


async def test_a_host_that_is_not_listed_is_not_reached(internet: Internet, index: PackageIndex) -> None:
    require("local")
    async with building(internet, index, network=NetworkRules((f"{index.host}:443",))) as made_by:
        with pytest.raises(ImageNotReady, match="index_hosts") as failed:
            await made_by.build("alpha")
        assert failed.value.retry_after_s is None and f"{index.files_host}:443" in str(failed.value)
    assert not any(request.startswith("/packages/") for request in index.requests)


async def test_the_credentials_of_an_index_stay_in_the_egress_process(
    internet: Internet, index: PackageIndex, tmp_path: Path
) -> None:
    require("local")
    (tmp_path / "secret").write_text("aW5kZXg6aHVudGVyMg==")
    (tmp_path / "secret").chmod(0o600)
    index.authorization = "Basic aW5kZXg6aHVudGVyMg=="
    secret = NetworkSecret(index.host, "Authorization", "Basic ${index}")
    rules = NetworkRules((f"{index.host}:443", f"{index.files_host}:443"), secrets=(secret,))
    async with building(internet, index, {"secrets": {"index": tmp_path / "secret"}}, network=rules) as made_by:
        made = await made_by.build("alpha")
        assert made.built.pins == ("alpha==1.0", "beta==2.0")
        for path in made_by.places.root.rglob("*"):
            if path.is_file() and path.stat().st_size < 2**20:
                assert b"aHVudGVyMg" not in path.read_bytes(), path


def _lock_file(index: PackageIndex, *projects: str) -> str:
    lines = ['lock-version = "1.0"', 'created-by = "tests"']
    for project in projects:
        release = index.projects[project][0]
        version = release.filename.split("-")[1]
        digest = hashlib.sha256(release.content).hexdigest()
        lines += ["[[packages]]", f'name = "{project}"', f'version = "{version}"']
        lines += [f'wheels = [{{ url = "https://elsewhere.example/x.whl", hashes = {{ sha256 = "{digest}" }} }}]']
    return "\n".join(lines) + "\n"


async def test_a_policys_lock_file_is_installed_without_resolving(
    made_by: Building, index: PackageIndex, tmp_path: Path
) -> None:
    lock = tmp_path / "pylock.toml"
    lock.write_text(_lock_file(index, "alpha", "beta"))
    # One file of the same version more, which the lock does not list and an installer likes better.
    index.add(make_wheel("alpha", tag=f"py3-none-linux_{os.uname().machine}"))
    known: dict[str, Any] = {"lock_file": str(lock), "lock_sha256": hashlib.sha256(lock.read_bytes()).hexdigest()}
    made = await made_by.build("beta", **known)
    assert made.built.pins == ("alpha==1.0", "beta==1.0")
    with pytest.raises(EnvironmentFailed, match="does not have gamma"):
        await made_by.build("gamma", **known)
    lock.write_text(_lock_file(index, "alpha"))
    with pytest.raises(EnvironmentFailed, match="has changed"):
        await made_by.build("beta", **known)


@pytest.mark.parametrize("damage", ["another byte", "missing"])
async def test_a_wheel_that_was_damaged_is_found_at_its_next_use_and_downloaded_again(
    made_by: Building, index: PackageIndex, damage: str
) -> None:
    made = await made_by.build("beta==2.0")
    (wheel,) = made_by.places.wheels.glob("*/beta-*.whl")
    content = wheel.read_bytes()
    if damage == "missing":
        shutil.rmtree(wheel.parent)
    else:
        wheel.write_bytes(content[:-9] + b"x" + content[-8:])
    index.forget_requests()
    again = await made_by.make(made.lock, "beta==2.0")
    assert again.site.joinpath("beta.py").read_text() == made.site.joinpath("beta.py").read_text()
    assert wheel.read_bytes() == content
    assert any(request.endswith(".whl") for request in index.requests)


async def test_no_build_sandbox_can_write_to_a_wheel(made_by: Building) -> None:
    await made_by.build("beta")
    (wheel,) = made_by.places.wheels.glob("*/beta-*.whl")
    code = f"""
import json, os
there = "/run/executor/programs/wheels/{wheel.parent.name}/{wheel.name}"
refused = []
for attempt in (lambda: open(there, "ab"), lambda: os.unlink(there), lambda: os.chmod(there, 0o666)):
    try:
        attempt()
    except OSError:
        refused.append(True)
print(json.dumps({{"reads": open(there, "rb").read(2) == b"PK", "refused": len(refused)}}))
"""
    work = made_by.places.work / "tried"
    work.mkdir()
    order = Order(made_by.backend, SPEC, BuildMounts(work=work, programs=made_by.places.programs))
    said: list[dict[str, Any]] = []
    async with open_build_sandbox(order) as sandbox:
        await sandbox.run(code, time_s=60.0, on_line=said.append)
    assert said == [{"reads": True, "refused": 3}]


async def test_a_wheel_that_is_not_what_its_own_list_says_is_refused(made_by: Building, index: PackageIndex) -> None:
    record = "odd.py,sha256=47DEQpj8HBSa-_TImW-5JCeuQeRkm5NMpJWZG3hSuFU,0\nodd-1.0.dist-info/RECORD,,\n"
    index.add(make_wheel("odd", record=record))
    with pytest.raises(EnvironmentFailed, match=r"'odd\.py' is not the file that odd 1\.0 lists"):
        await made_by.build("odd")
    assert made_by.left == []


async def test_two_packages_with_the_same_file_are_refused_unless_it_is_the_same(
    made_by: Building, index: PackageIndex
) -> None:
    for project, said in (("clay", "clay"), ("slip", "slip"), ("mud", "clay")):
        index.add(make_wheel(project, files={"shared/said.py": f"WORD = {said!r}\n", f"{project}.py": ""}))
    made = await made_by.build("clay", "mud")
    assert (made.site / "shared/said.py").read_text() == "WORD = 'clay'\n"
    with pytest.raises(
        EnvironmentFailed, match=r"clay 1\.0 and slip 1\.0, have the file 'shared/said\.py' with different"
    ):
        await made_by.build("clay", "slip")


async def test_an_abandoned_build_leaves_no_build_sandbox(made_by: Building, index: PackageIndex) -> None:
    release = index.add(make_wheel("gamma"), behaviour="stops")
    task = asyncio.create_task(made_by.build("gamma"))
    assert await eventually_async(lambda: any(request.endswith(release.filename) for request in index.requests))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert made_by.existing() == []
    release.behaviour = "whole"
    assert (await made_by.build("gamma")).built.pins == ("gamma==1.0",)
    assert made_by.left == []


async def test_builds_at_the_same_time_do_not_disturb_each_other(made_by: Building, index: PackageIndex) -> None:
    for name in ("one", "two", "three"):
        index.add(make_wheel(name, requires=["alpha"]))
    made = await asyncio.gather(*(made_by.build(name) for name in ("one", "two", "three")))
    assert [each.built.modules for each in made] == [("alpha", "beta", name) for name in ("one", "two")] + [
        ("alpha", "beta", "three")
    ]
    assert len(list(made_by.places.wheels.glob("*/beta-*.whl"))) == 1
    assert made_by.left == []


async def test_many_packages_stay_within_the_connections_of_a_build_sandbox(
    made_by: Building, index: PackageIndex, capsys: pytest.CaptureFixture[str]
) -> None:
    """uv opens dozens of connections to each host, and a session's usual rules refuse the thirty-third."""
    names = [f"part-{number}" for number in range(80)]
    for name in names:
        index.add(make_wheel(name), serves_metadata=False, behaviour="slow")
    index.add(make_wheel("whole", requires=names))
    made = await made_by.build("whole")
    assert len(made.built.pins) == 81
    said = capsys.readouterr()
    log = said.out + said.err
    assert "build_sandbox_connected" in log and "too_many_connections" not in log
