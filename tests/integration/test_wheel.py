"""The wheel holds what its commands need: what works in a clone works from an installed package."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(directory)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=120, check=True)
    (wheel,) = directory.glob("*.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_images_can_be_built_from_a_wheel(names: set[str]) -> None:
    recipes = {str(path.relative_to(ROOT / "images")) for path in (ROOT / "images").rglob("*") if path.is_file()}
    inside = "executor_server/daemon/cli/image_building/"
    assert {f"{inside}recipes/{name}" for name in recipes if "__pycache__" not in name} <= names
    assert f"{inside}debian_base.sh" in names


def test_every_module_is_in_the_wheel(names: set[str]) -> None:
    sources = {"": "executor_server", "client": "executor_client", "proto": "executor_api"}
    for folder, package in sources.items():
        root = ROOT / folder
        modules = {str(path.relative_to(root)) for path in (root / package).rglob("*.py")}
        assert modules <= names
