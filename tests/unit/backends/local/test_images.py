"""An image shows the directories that its interpreter needs, or is refused. The interpreters here only print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from executor_server.backends.local.images import probe_image
from executor_server.core.errors import SandboxFailure
from tests.support.interpreters import require_python


def interpreter(
    path: Path,
    prefixes: Sequence[Path | str],
    version: Sequence[int] = (3, 12),
    name: str = "cpython",
    packages: Path | None = None,
) -> Path:
    places = [str(packages or Path(prefixes[0], "packages"))]
    tale = {"implementation": name, "version": version, "prefixes": list(map(str, prefixes)), "packages": places}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{json.dumps(tale)}'\n")
    path.chmod(0o755)
    return path


def test_a_virtual_environment_brings_the_python_that_it_was_made_from(tmp_path: Path) -> None:
    base, venv = tmp_path / "base", tmp_path / "venv"
    python = interpreter(base / "bin/python3", [venv, venv, base, base])
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(python)
    image = probe_image("x", venv / "bin/python")
    assert image.python == venv / "bin/python"
    assert (image.directories, image.links) == ((base, venv), ())


@pytest.mark.parametrize(
    ("version", "has_system_packages"),
    [("3.9", False), ("3.10", True), ("3.11", False), ("3.12", True), ("3.13", False), ("system", True)],
)
def test_nothing_that_was_installed_in_an_environment_runs_on_the_host(
    tmp_path: Path, version: str, has_system_packages: bool
) -> None:
    """Lines of a .pth file ran with every start of the interpreter that asked it for its directories, as the daemon."""
    base = Path("/usr/bin/python3") if version == "system" else require_python(version)
    if not base.exists():
        pytest.skip("the system has no Python")
    env, mark = tmp_path / "env", tmp_path / "mark"
    options = ["--system-site-packages"] if has_system_packages else []
    subprocess.run([base, "-m", "venv", "--without-pip", *options, env], check=True, capture_output=True)
    (packages,) = env.glob("lib/python*/site-packages")
    (packages / "evil.pth").write_text(f"import os; open({str(mark)!r}, 'w').close()\n")
    (packages / "sitecustomize.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    image = probe_image("x", env)
    assert not mark.exists()
    assert image.packages[0] == packages
    assert any(not place.is_relative_to(env) for place in image.packages) is has_system_packages
    assert env in image.directories
    subprocess.run([env / "bin/python", "-I", "-c", ""], check=True)
    assert mark.exists(), "an ordinary start would have run it"


def test_a_prefix_inside_another_is_mounted_once(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "base/bin/python3", [tmp_path / "base/env", tmp_path / "base"])
    assert probe_image("x", python).directories == (tmp_path / "base",)


def test_packages_outside_of_every_prefix_are_shown(tmp_path: Path) -> None:
    """Debian's own Python has its prefix in /usr and the packages that pip installs below /usr/local."""
    packages = tmp_path / "local/lib/dist-packages"
    python = interpreter(tmp_path / "base/bin/python3", [tmp_path / "base"], packages=packages)
    assert probe_image("x", python).directories == (tmp_path / "base",), "there are none"
    packages.mkdir(parents=True)
    assert probe_image("x", python).directories == (tmp_path / "base", packages)


def test_the_system_s_python_needs_no_further_directory(tmp_path: Path) -> None:
    assert all(not str(place).startswith("/usr") for place in probe_image("x", Path(sys.executable)).directories)


def test_a_prefix_that_is_a_link_is_mounted_at_both_paths(tmp_path: Path) -> None:
    """So are the Pythons of uv: cpython-3.12 is a link to cpython-3.12.1, and environments name either."""
    exact, minor = tmp_path / "cpython-3.12.1", tmp_path / "cpython-3.12"
    interpreter(exact / "bin/python3", [minor])
    minor.symlink_to(exact)
    assert probe_image("x", minor / "bin/python3").directories == (minor, exact)


def test_links_outside_of_the_prefixes_are_made_again(tmp_path: Path) -> None:
    python = interpreter(tmp_path / "base/bin/python3", [tmp_path / "base"])
    outer, inner = tmp_path / "shims/outer", tmp_path / "shims/inner"
    inner.parent.mkdir()
    inner.symlink_to(python)
    outer.symlink_to("inner")
    assert probe_image("x", outer).links == ((outer, "inner"), (inner, str(python)))


@pytest.mark.parametrize("prefix", ["/", "/home", "/root", "/var", "/etc", "relative"])
def test_a_prefix_that_would_show_the_host_is_refused(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(SandboxFailure, match="cannot be shown"):
        probe_image("x", interpreter(tmp_path / "python", [prefix]))


def test_an_interpreter_outside_of_its_prefix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match="outside of its own prefix"):
        probe_image("x", interpreter(tmp_path / "python", [tmp_path / "elsewhere"]))


@pytest.mark.parametrize(("version", "name"), [((3, 8), "cpython"), ((3, 10), "pypy")])
def test_other_pythons_are_refused(tmp_path: Path, version: tuple[int, int], name: str) -> None:
    with pytest.raises(SandboxFailure, match=r"CPython 3\.9 or newer is needed"):
        probe_image("x", interpreter(tmp_path / "python", [tmp_path], version, name))


@pytest.mark.parametrize("python", ["/bin/true", "/nonexistent"])
def test_a_program_that_is_no_python_is_refused(python: str) -> None:
    with pytest.raises(SandboxFailure, match=python):
        probe_image("x", Path(python))


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(SandboxFailure, match="cannot be run"):
        probe_image("x", tmp_path / "a")


@pytest.mark.parametrize("name", ["python", "python3"])
def test_an_environment_may_be_named_by_its_folder(tmp_path: Path, name: str) -> None:
    python = interpreter(tmp_path / "bin" / name, [tmp_path])
    assert probe_image("x", tmp_path).python == python


def test_a_folder_without_an_interpreter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailure, match="no Python environment, it has no bin/python or bin/python3"):
        probe_image("x", tmp_path)


def test_an_unchanged_environment_keeps_its_identity(tmp_path: Path) -> None:
    interpreter(tmp_path / "bin/python", [tmp_path])
    image = probe_image("x", tmp_path)
    assert image.is_current()
    assert probe_image("x", tmp_path).identity == image.identity


def _rebuild(environment: Path) -> None:
    (environment / "pyvenv.cfg").write_text("version = 3.13\n")


def _replace_interpreter(environment: Path) -> None:
    (environment / "bin/python").rename(environment / "bin/old")
    interpreter(environment / "bin/python", [environment])


def _install(environment: Path) -> None:
    (environment / "packages/new").mkdir(parents=True)


def _remove(environment: Path) -> None:
    (environment / "bin/python").unlink()


@pytest.mark.parametrize("change", [_rebuild, _replace_interpreter, _install, _remove])
def test_a_changed_environment_has_another_identity(tmp_path: Path, change: Callable[[Path], None]) -> None:
    interpreter(tmp_path / "bin/python", [tmp_path])
    image = probe_image("x", tmp_path)
    change(tmp_path)
    assert not image.is_current()
