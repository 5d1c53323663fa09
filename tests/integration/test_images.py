"""Our images: each does what it promises in a sandbox, gives no rights, and shows nothing of where it was built."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from executor_client import Outcome
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.engine import engine_client
from tests.support.fork_server import server

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("base", "data", "browser")

# Lists installers, compilers and set-user-ID files, with which code in a sandbox could build or gain something.
ESCALATIONS = """
import importlib.util, os, shutil, stat
found = [name for name in ("pip", "pip3", "gcc", "cc", "make", "sudo") if shutil.which(name)]
found += [name for name in ("pip", "setuptools", "ensurepip") if importlib.util.find_spec(name)]
for folder, _, names in os.walk("/usr"):
    for name in names:
        mode = os.lstat(os.path.join(folder, name)).st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            found.append(os.path.join(folder, name))
found
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("docker")
    # Without a pool: a warm sandbox would be the next test's leftover.
    with daemon_of("[pool]\nsize = 0\n", "--backend", "docker") as running:
        yield running


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> str:
    require("docker")
    if not _metadata(request.param):
        if "docker" in os.environ.get("REQUIRED_BACKENDS", "").split(","):
            pytest.fail(f"there is no image {request.param}, and it is required", pytrace=False)
        pytest.skip(f"there is no image {request.param}; `make images` builds it")
    return str(request.param)


def test_an_image_does_in_a_sandbox_what_it_promises(daemon: Daemon, image: str) -> None:
    code = (ROOT / "images" / image / "probe.py").read_text()
    with daemon.client() as client, client.create_session(image=image, authorized_imports=["*"]) as session:
        result = session.execute(code)
    assert result.outcome is Outcome.SUCCEEDED, result.error
    assert len(result.images) == (1 if image == "data" else 0)


def test_an_image_holds_nothing_that_installs_builds_or_gives_rights(daemon: Daemon, image: str) -> None:
    with daemon.client() as client, client.create_session(image=image, authorized_imports=["*"]) as session:
        result = session.execute(ESCALATIONS)
    assert result.outcome is Outcome.SUCCEEDED and result.output == []


def test_an_image_by_itself_runs_as_an_ordinary_user_and_offers_nothing(image: str) -> None:
    config = _metadata(image)["Config"]
    assert config["User"] == "sandbox"
    assert [config.get(key) for key in ("Entrypoint", "Volumes", "ExposedPorts", "OnBuild")] == [None] * 4


def test_an_image_shows_nothing_of_where_it_was_built(image: str) -> None:
    with engine_client() as client:
        described = json.dumps(
            [client.inspect_image(f"remote-executor/{image}"), client.history(f"remote-executor/{image}")]
        )
    assert [place for place in _sources_of_this_host() if place in described] == []


def test_images_have_the_same_version_of_what_they_share() -> None:
    """Another version of NumPy would be installed over the base's, and the image would hold both."""
    locks = {name: _pins(ROOT / "images" / name / "requirements.txt") for name in IMAGES}
    shared = locks["base"].keys() & locks["data"].keys()
    assert shared == {"cloudpickle", "numpy", "pillow"}
    assert {name: locks["data"][name] for name in shared} == {name: locks["base"][name] for name in shared}


def test_every_package_is_pinned_by_its_hash() -> None:
    for lock in (ROOT / "images").rglob("*.txt"):
        if lock.name != "packages.txt":
            entries = re.split(r"\n(?=\S)", lock.read_text().strip())
            assert [entry for entry in entries if not re.match(r"[\w.-]+==[\w.]+ \\\n\s+--hash=sha256:", entry)] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "no image nonsense; available: "),
        (["base", "--base", "localhost:1/no/such"], "localhost:1/no/such can't be used as a base"),
    ],
)
def test_what_cannot_be_built_is_refused_in_a_line(arguments: list[str], message: str) -> None:
    require("docker")
    done = server("images", "build", *arguments)
    assert done.returncode != 0
    assert message in done.stderr and "Traceback" not in done.stderr


# ---------------------------------------------------------------------------------------------------------------------


def _metadata(image: str) -> dict[str, Any]:
    """Returns the Engine's description of an image; empty when it has none."""
    with engine_client() as client:
        reference = f"remote-executor/{image}"
        return dict(client.inspect_image(reference)) if client.images(reference) else {}


def _sources_of_this_host() -> set[str]:
    """Hosts and folders from which pip and apt of this host install."""
    pip = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = [
        line.partition("=")[2].strip(" '\"") for line in pip.stdout.splitlines() if "index" in line or "link" in line
    ]
    if shutil.which("apt-get"):
        targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)"]
        settings += subprocess.run(targets, capture_output=True, text=True, check=True).stdout.split()
    places = set()
    for setting in " ".join(settings).split():
        url = urlsplit(setting)
        places.add(url.hostname or url.path)
    return {place for place in places if len(place) > 1}


def _pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock.read_text(), re.MULTILINE))
