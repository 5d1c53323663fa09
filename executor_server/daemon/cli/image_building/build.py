"""Builds the images on the Engine, and tries each with our guest: `executor-server images build base data`.

This file decides where the packages come from, and the images don't show it. The public base is taken from its
registry; if that can't be reached, one is made from this host's Debian (debian_base.sh). The Python packages are
downloaded on this host, by its pip and so with its configuration, mirrors and certificates, and given to the build as
files. So a build asks no index. The exception is Debian packages that a public base lacks: apt fetches them during the
build, from the sources of that base.

The recipes are the folders of `images/` in the repository. A wheel contains them (`recipes/` next to this file).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PACKAGED, _CHECKED_OUT = _HERE / "recipes", _HERE.parents[3] / "images"
RECIPES = _PACKAGED if _PACKAGED.is_dir() else _CHECKED_OUT

SANDBOX_IMAGES = ("base", "data", "browser")
"""Images for sandboxes, which are tried with our guest."""
DAEMON_IMAGES = ("daemon", "demo")
"""The daemon itself, and an agent that tries it."""

PUBLIC_BASE = "python:3.11-slim-bookworm"
# Packages that a bare Debian needs to be a base; the wheels use the C++ library, and time zones are a package of their
# own.
DEBIAN_PACKAGES = ("python3", "libstdc++6", "tzdata")
PULL_TIMEOUT_S = 600.0
FAILURE_TAIL_CHARS = 8_000

# glibc 2.5, of manylinux1, is the oldest that a wheel can be for.
OLDEST_GLIBC_MINOR = 5
# Published as source, without wheels; pure Python.
SOURCE_ONLY = ("helium",)
LEGACY_TAGS = ("manylinux2014", "manylinux2010", "manylinux1")

INTERPRETER = """
import json, os, platform, sys
libc, minor = os.confstr("CS_GNU_LIBC_VERSION").split()[1].split(".")[:2]
print(json.dumps([sys.version_info[0], sys.version_info[1], platform.machine(), int(minor)]))
"""


class BuildFailure(Exception):
    """An image can't be built; the message says why."""


@dataclass(frozen=True)
class Interpreter:
    """The Python of a base, as far as wheels depend on it."""

    major: int
    minor: int
    machine: str
    glibc_minor: int

    def pip_options(self) -> list[str]:
        """Makes pip download for this interpreter instead of its own."""
        plain = f"{self.major}{self.minor}"
        tags = [f"manylinux_2_{minor}" for minor in range(OLDEST_GLIBC_MINOR, self.glibc_minor + 1)]
        options = ["--implementation", "cp", "--python-version", f"{self.major}.{self.minor}"]
        for abi in (f"cp{plain}", "abi3", "none"):
            options += ["--abi", abi]
        for tag in (*tags, *LEGACY_TAGS):
            options += ["--platform", f"{tag}_{self.machine}"]
        return options


class Bases:
    """Finds the base of the images, once."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._found: str | None = None

    @property
    def reference(self) -> str | None:
        """The given base, else the public one; None when that can't be pulled."""
        if self._found is None:
            self._found = self._given or (PUBLIC_BASE if _obtain(PUBLIC_BASE) else "")
        return self._found or None

    def with_packages(self, recipe: Path) -> str:
        """Returns a base that has the Debian packages of this recipe, or one on which apt can get them."""
        if self.reference is not None:
            return self.reference
        packages = [*DEBIAN_PACKAGES, *(recipe / "packages.txt").read_text().split()]
        command = ["bash", str(_HERE / "debian_base.sh"), str(RECIPES / "dpkg.cfg"), *packages]
        made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if made.returncode != 0:
            raise BuildFailure("no registry can be reached, and no Debian base be made; give one with --base")
        return made.stdout.strip()


def _obtain(reference: str) -> bool:
    """True when the Engine has an image or can pull it."""
    if _engine("image", "inspect", reference).returncode == 0:
        return True
    print(f"images: pulling {reference}", flush=True)
    try:
        pulled = _engine("pull", "--quiet", reference, timeout_s=PULL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    if pulled.returncode != 0:
        print(f"images: it could not be pulled ({pulled.stdout.strip()[:200]}); making a base from this host's Debian")
    return pulled.returncode == 0


class Builder:
    """Builds images for one Engine. Downloads and build contexts lie in `cache`, and are kept for the next build."""

    def __init__(self, cache: Path, base: str, version: str) -> None:
        """`base` is the image to build on; empty: the public one, else a Debian made on this host."""
        self._cache = cache
        self._bases = Bases(base)
        self._version = version

    def build_all(self, names: Collection[str]) -> None:
        """Builds images and the images below them. Raises BuildFailure."""
        # A base made from Debian has the packages of its recipe, so the other images can't share the browser's.
        shared = self._bases.with_packages(RECIPES / "data")
        plain = self.build(RECIPES / "base", shared, "remote-executor/base")
        if {"data", *DAEMON_IMAGES} & set(names):
            data = self.build(RECIPES / "data", plain, "remote-executor/data")
        if "browser" in names:
            own = self._bases.with_packages(RECIPES / "browser")
            parent = plain if own == shared else self.build(RECIPES / "base", own, "remote-executor/base-of-browser")
            self.build(RECIPES / "browser", parent, "remote-executor/browser")
        if set(DAEMON_IMAGES) & set(names):
            # The daemon's sandboxes use the image's own Python, so it is built on the image with packages for agents.
            daemon = self.build(RECIPES / "daemon", data, "remote-executor/daemon")
        if "demo" in names:
            self.build(RECIPES / "demo", daemon, "remote-executor/demo")

    def build(self, folder: Path, base: str, repository: str) -> str:
        """Builds the recipe in a folder on a base, and returns the reference with the version. Raises BuildFailure."""
        began = time.monotonic()
        reference = f"{repository}:{self._version}"
        context = self._context(folder, base)
        arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"VERSION={self._version}"]
        tags = ["--tag", reference, "--tag", f"{repository}:latest"]
        # The network is the host's: apt may need it, and an Engine may have no other.
        done = _engine("build", "--network", "host", "--force-rm", *arguments, *tags, str(context))
        if done.returncode != 0:
            raise BuildFailure(f"{reference} can't be built:\n{done.stdout[-FAILURE_TAIL_CHARS:]}")
        size = int(_engine("image", "inspect", "--format", "{{.Size}}", reference).stdout)
        print(f"images: {reference:38} {size / 1e6:6.0f} MB  {time.monotonic() - began:5.1f} s", flush=True)
        return reference

    def _context(self, folder: Path, base: str) -> Path:
        """Returns a directory with the files of the image and hard links to its wheels, which are large."""
        wheels = self._wheels(folder, base)
        context = self._cache / "context" / folder.name
        shutil.rmtree(context, ignore_errors=True)
        shutil.copytree(folder, context)
        shutil.copy(RECIPES / "dpkg.cfg", context)
        shutil.copytree(wheels, context / "wheels", copy_function=os.link)
        if folder.name == "daemon":
            copy_distribution(context / "distribution")
        return context

    def _wheels(self, image: Path, base: str) -> Path:
        """Returns a folder with the pinned packages of an image for a base's Python, and a pip; downloaded once."""
        name, locks = image.name, [RECIPES / "installer.txt", *sorted(image.glob("*requirements.txt"))]
        interpreter = _interpreter(base)
        key = hashlib.sha256(repr(interpreter).encode() + b"".join(lock.read_bytes() for lock in locks)).hexdigest()
        folder = self._cache / "wheels" / f"{name}-{key[:16]}"
        if folder.exists():
            return folder
        print(f"images: downloading the packages of {name}", flush=True)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for lock in locks:
            _download(lock, interpreter, partial)
        for outdated in folder.parent.glob(f"{name}-*"):
            if outdated != partial:
                shutil.rmtree(outdated)
        partial.rename(folder)
        return folder


def copy_distribution(target: Path) -> None:
    """Copies this distribution as it is installed here, so that a daemon image has the very code that built it.

    Left out: compiled files, and records of where and how it was installed.
    """
    for package in ("executor_server", "executor_client", "executor_api"):
        source = Path(import_module(package).__file__ or "").parent
        shutil.copytree(source, target / package, ignore=shutil.ignore_patterns("__pycache__", "recipes"))
    installed = metadata.distribution("remote-executor")
    info = target / f"remote_executor-{installed.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(installed.read_text(name) or "")


@contextmanager
def exclusive(cache: Path) -> Iterator[None]:
    """Keeps other builds out of the cache. Raises BuildFailure while another one uses it."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as busy:
            raise BuildFailure("another build is running here") from busy
        yield


def require_engine() -> None:
    """Raises BuildFailure when no Engine answers."""
    if shutil.which("docker") is None:
        raise BuildFailure("no `docker` command, which builds images; install Docker")
    if _engine("version").returncode != 0:
        raise BuildFailure("the Docker Engine does not answer; start it (`make engine` in a clone of the repository)")


def _download(lock: Path, interpreter: Interpreter, folder: Path) -> None:
    if find_spec("pip") is None:
        raise BuildFailure("this environment has no pip to download packages with; add it: python -m ensurepip")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:", *interpreter.pip_options()]
    for package in SOURCE_ONLY:
        command += ["--no-binary", package]
    done = subprocess.run(
        [*command, "--requirement", lock, "--dest", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise BuildFailure(f"pip can't download {lock}:\n{done.stdout[-FAILURE_TAIL_CHARS:]}")


def _interpreter(base: str) -> Interpreter:
    asked = _engine("run", "--rm", "--network", "none", "--entrypoint", "python3", base, "-I", "-c", INTERPRETER)
    if asked.returncode != 0:
        raise BuildFailure(f"{base} can't be used as a base: {asked.stdout.strip()[-500:]}")
    return Interpreter(*json.loads(asked.stdout.splitlines()[-1]))


def _engine(*arguments: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
