"""Builds the images of `images/` on the Engine, and tries each with our guest: `make images IMAGES="base data"`.

Where the packages come from is decided here and stays here. The public base is taken from its registry; where that
can't be reached, one is made from this host's Debian (debian_base.sh). The Python packages are downloaded on this host,
by its pip and so with its configuration, mirrors and certificates, and given to the build as files. So a build asks no
index, and no image can tell where it was built. The exception is what Debian packages a public base lacks: apt in the
build fetches them from where that base says.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "images"
CACHE = ROOT / ".cache" / "images"
BENCHMARKS = ROOT / "benchmarks" / "reference"

NAMES = ("base", "data", "browser")
# What benchmarks compare with, which is not ours and so not tried with our guest.
OTHERS = ("jupyter",)

PUBLIC_BASE = "python:3.11-slim-bookworm"
# What a bare Debian needs to be a base; the wheels use the C++ library, and time zones are a package of their own.
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
    """Finds what the images are built on, once."""

    def __init__(self, given: str) -> None:
        self._given = given
        self._found: str | None = None

    @property
    def reference(self) -> str | None:
        """The base that is given or public; None when there is no way to one."""
        if self._found is None:
            self._found = self._given or (PUBLIC_BASE if _obtain(PUBLIC_BASE) else "")
        return self._found or None

    def with_packages(self, name: str) -> str:
        """A base on which the image of this name needs no package any more. Or one where apt can get them."""
        if self.reference is not None:
            return self.reference
        packages = [*DEBIAN_PACKAGES, *(IMAGES / name / "packages.txt").read_text().split()]
        made = subprocess.run(
            [ROOT / "tools" / "debian_base.sh", *packages], stdout=subprocess.PIPE, text=True, check=False
        )
        if made.returncode != 0:
            raise BuildFailure("no registry can be reached, and no Debian base be made; give one as BASE=")
        return made.stdout.strip()


def _obtain(reference: str) -> bool:
    """Whether the Engine has an image or can pull it."""
    if _engine("image", "inspect", reference).returncode == 0:
        return True
    print(f"images: pulling {reference}", flush=True)
    try:
        pulled = _engine("pull", "--quiet", reference, timeout_s=PULL_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return False
    if pulled.returncode != 0:
        print(f"images: it can't be had ({pulled.stdout.strip()[:200]}); making a base from this host's Debian")
    return pulled.returncode == 0


# ---------------------------------------------------------------------------------------------------------------------


def build_all(names: Collection[str], base: str, version: str) -> None:
    """Builds images and those that they are built on."""
    bases = Bases(base)
    # Made from Debian, the browser's base has its packages already, and so is none that the others could share.
    shared = bases.with_packages("data")
    plain = build(IMAGES / "base", shared, "remote-executor/base", version)
    if "data" in names:
        build(IMAGES / "data", plain, "remote-executor/data", version)
    if "browser" in names:
        own = bases.with_packages("browser")
        parent = plain if own == shared else build(IMAGES / "base", own, "remote-executor/base-of-browser", version)
        build(IMAGES / "browser", parent, "remote-executor/browser", version)
    if "jupyter" in names:
        build(BENCHMARKS / "jupyter", plain, "remote-executor-bench/jupyter", version)


def build(folder: Path, base: str, repository: str, version: str) -> str:
    """Builds what is in a folder on a base, and returns the reference with the version."""
    began = time.monotonic()
    reference = f"{repository}:{version}"
    context = _context(folder, base)
    arguments = ["--build-arg", f"BASE={base}", "--build-arg", f"VERSION={version}"]
    tags = ["--tag", reference, "--tag", f"{repository}:latest"]
    # Of the host: apt may need it, and an Engine may have no other.
    done = _engine("build", "--network", "host", "--force-rm", *arguments, *tags, str(context))
    if done.returncode != 0:
        raise BuildFailure(f"{reference} can't be built:\n{done.stdout[-FAILURE_TAIL_CHARS:]}")
    size = int(_engine("image", "inspect", "--format", "{{.Size}}", reference).stdout)
    print(f"images: {reference:38} {size / 1e6:6.0f} MB  {time.monotonic() - began:5.1f} s", flush=True)
    return reference


def _context(folder: Path, base: str) -> Path:
    """A directory with the files of the image and its wheels, these as links, since they are large."""
    wheels = _wheels(folder, base)
    context = CACHE / "context" / folder.name
    shutil.rmtree(context, ignore_errors=True)
    shutil.copytree(folder, context)
    shutil.copy(IMAGES / "dpkg.cfg", context)
    shutil.copytree(wheels, context / "wheels", copy_function=os.link)
    return context


def _wheels(image: Path, base: str) -> Path:
    """The pinned packages of an image for the Python of a base, and a pip to install them; downloaded once."""
    name, locks = image.name, [IMAGES / "installer.txt", *sorted(image.glob("*requirements.txt"))]
    interpreter = _interpreter(base)
    key = hashlib.sha256(repr(interpreter).encode() + b"".join(lock.read_bytes() for lock in locks)).hexdigest()
    folder = CACHE / "wheels" / f"{name}-{key[:16]}"
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


def _download(lock: Path, interpreter: Interpreter, folder: Path) -> None:
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
        raise BuildFailure(f"pip can't download {lock.relative_to(ROOT)}:\n{done.stdout[-FAILURE_TAIL_CHARS:]}")


def _interpreter(base: str) -> Interpreter:
    asked = _engine("run", "--rm", "--network", "none", "--entrypoint", "python3", base, "-I", "-c", INTERPRETER)
    if asked.returncode != 0:
        raise BuildFailure(f"{base} is no base: {asked.stdout.strip()[-500:]}")
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names",
        nargs="*",
        default=NAMES,
        metavar="NAME",
        help=f"of {', '.join(NAMES)} (default: all), {', '.join(OTHERS)}",
    )
    parser.add_argument(
        "--base", default="", help=f"image to build on (default: {PUBLIC_BASE}, else this host's Debian)"
    )
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - {*NAMES, *OTHERS}):
        parser.error(f"no such image: {', '.join(unknown)}")
    wanted = {"base", *asked.names}  # the others are built on it
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            parser.exit(1, "images: another build runs here\n")
        return build_and_probe(wanted, asked.base)


def build_and_probe(wanted: Collection[str], base: str) -> int:
    """Returns the exit code."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    try:
        if shutil.which("docker") is None or _engine("version").returncode != 0:
            raise BuildFailure("no Docker Engine answers; `make engine` starts one")
        build_all(wanted, base, version)
    except BuildFailure as failure:
        print(f"images: {failure}", file=sys.stderr)
        return 1
    probe = [sys.executable, str(ROOT / "tools" / "probe_images.py"), *(name for name in NAMES if name in wanted)]
    return subprocess.run(probe, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
