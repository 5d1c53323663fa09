"""Images of the local backend: Python environments of this host, with the directories that they need to see.

An image is given by the path of its interpreter, or of the folder of a virtual environment that has one. That path is
kept unresolved: a virtual environment is found through it. The interpreter reports the directories that it needs, its
own prefix and the prefix of the Python that the environment was made from, when the daemon starts, and again when the
environment has changed: rebuilt, or with other packages in it.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_server.backends.local.system import SHOWN_DIRECTORIES, SYSTEM_PREFIX, TOOL_DIRECTORIES
from executor_server.backends.python_probe import UNREADABLE, UnusablePython, python_version
from executor_server.core import SandboxFailure

_PROBE_TIMEOUT_S = 30.0
_PROBE_OUTPUT_BYTES = 65_536
_LINKS = 40  # as many as the kernel follows
_IDENTITY_CHARS = 16
_TELLTALES_BEFORE_PACKAGES = 2
_PYTHONS = ("bin/python", "bin/python3")  # in an environment's folder
# Mounting one of these would show a sandbox what it must not see; an interpreter with such a prefix is a mistake.
_NOT_A_PREFIX = tuple(Path(name) for name in ("/", "/home", "/root", "/var", "/etc", "/tmp", "/run", "/opt", "/srv"))

# Packages can bring `.pth` files, whose lines run whenever `site` adds their directory. With -S it does not add them,
# and this program calls only the part of `site` that finds the prefix of a virtual environment. So no installed package
# runs on the host. The C modules are Python's own; importing them shows the libraries that the linker loads.
_PROBE = """\
import importlib, json, site, sys
site.addsitedir = lambda *args, **options: None
site.venv(set())
for name in ("_bz2", "_ctypes", "_curses", "_dbm", "_gdbm", "_hashlib", "_lzma", "_sqlite3", "_ssl", "_tkinter",
             "_uuid", "_zstd", "pyexpat", "readline", "zlib"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
with open("/proc/self/maps") as file:
    mapped = {line.split(None, 5)[5].strip() for line in file if "r-xp" in line and "/" in line}
print(json.dumps({"implementation": sys.implementation.name, "version": sys.version_info[:2], "prefixes":
    [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix], "packages": site.getsitepackages(),
    "libraries": sorted(path for path in mapped if ".so" in path)}))
"""


@dataclass(frozen=True)
class Image:
    name: str
    python: Path
    version: tuple[int, int]
    directories: tuple[Path, ...]  # in addition to the system's; each is mounted at its path on the host
    links: tuple[tuple[Path, str], ...]  # symbolic links outside of them, on the path to the interpreter
    preload: tuple[str, ...]  # modules that a sandbox imports ahead
    telltales: tuple[Path, ...]  # files and folders that change when the environment does
    identity: str  # a hash of their state when the interpreter was probed

    @property
    def packages(self) -> tuple[Path, ...]:
        """Directories of its packages; some of them may not exist."""
        return self.telltales[_TELLTALES_BEFORE_PACKAGES:]

    def is_current(self) -> bool:
        """True while the environment is unchanged since the probe, as far as a few of its files show."""
        return self.identity == _identity(self.python, self.telltales)


def probe_image(name: str, path: Path, preload: tuple[str, ...] = ()) -> Image:
    """Runs the interpreter at `path`, or in that folder, and reads its description of itself.

    Raises SandboxFailure when it cannot serve as an image.
    """
    python = _interpreter(name, path)
    described = _describe(name, python)
    try:
        version = python_version(described)
        prefixes = [Path(prefix) for prefix in described["prefixes"]]
        telltales = (python, prefixes[0] / "pyvenv.cfg", *(Path(place) for place in described["packages"]))
        assert len(telltales) - len(described["packages"]) == _TELLTALES_BEFORE_PACKAGES
        libraries = [Path(str(path)).parent for path in described.get("libraries", ())]
        # They may lie outside of every prefix: Debian's own Python, in /usr, has pip's packages in /usr/local.
        packages = [place for place in map(Path, described["packages"]) if place.is_dir()]
    except UnusablePython as error:
        raise SandboxFailure(f"image {name}: {python} {error}") from error
    except UNREADABLE as error:
        raise SandboxFailure(f"image {name}: {python} does not answer like a Python interpreter") from error
    directories = _directories(name, prefixes, (*libraries, *packages))
    links = _links(name, python, (*SHOWN_DIRECTORIES, *TOOL_DIRECTORIES, *directories))
    return Image(name, python, version, directories, links, preload, telltales, _identity(python, telltales))


def _interpreter(name: str, path: Path) -> Path:
    if not path.is_dir():
        return path
    for python in _PYTHONS:
        if (path / python).exists():
            return path / python
    raise SandboxFailure(f"image {name}: the folder {path} is no Python environment, it has no {' or '.join(_PYTHONS)}")


def _identity(python: Path, telltales: Iterable[Path]) -> str:
    """Depends on the host's file system only, and so is the same in another daemon."""
    seen = repr((str(python), os.path.realpath(python), *(_state(path) for path in telltales)))
    return hashlib.sha256(seen.encode()).hexdigest()[:_IDENTITY_CHARS]


def _state(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:  # it does not exist, or we may not see it: that is a state, too
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _describe(name: str, python: Path) -> dict[str, Any]:
    try:
        answer = subprocess.run(
            [python, "-I", "-S", "-c", _PROBE],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={"LANG": "C.UTF-8"},
            timeout=_PROBE_TIMEOUT_S,
            check=True,
        )
        described = json.loads(answer.stdout[:_PROBE_OUTPUT_BYTES])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxFailure(f"image {name}: the interpreter {python} cannot be run: {error}") from error
    if not isinstance(described, dict):
        raise SandboxFailure(f"image {name}: {python} does not answer like a Python interpreter")
    return described


def _directories(name: str, prefixes: Iterable[Path], others: Iterable[Path]) -> tuple[Path, ...]:
    """Returns the prefixes and their resolved paths, each once, none inside another or inside the system's.

    `others` are further directories that the interpreter needs: those of its packages and of its libraries.
    """
    wanted = {place for prefix in prefixes for place in (prefix, prefix.resolve())} - {SYSTEM_PREFIX}
    for prefix in wanted:
        if prefix in _NOT_A_PREFIX or not prefix.is_absolute():
            raise SandboxFailure(f"image {name}: its prefix is {prefix}, which cannot be shown to a sandbox")
    wanted |= {place for place in others if place not in _NOT_A_PREFIX}
    outermost: list[Path] = []
    for prefix in sorted(wanted):  # a directory sorts before what is inside it
        if not _covered(prefix, (*SHOWN_DIRECTORIES, *outermost)):
            outermost.append(prefix)
    return tuple(outermost)


def _links(name: str, python: Path, visible: tuple[Path, ...]) -> tuple[tuple[Path, str], ...]:
    """Symbolic links on the path to the interpreter, outside of all mounts: a sandbox needs links of its own."""
    links: list[tuple[Path, str]] = []
    at, rest = Path("/"), list(python.absolute().parts[1:])
    followed = 0
    while rest:
        step = rest.pop(0)
        if step == "..":
            at = at.parent
        elif not (at / step).is_symlink():
            at = at / step
        else:
            followed += 1
            if followed > _LINKS:
                raise SandboxFailure(f"image {name}: too many symbolic links on the way to {python}")
            target = (at / step).readlink()
            if not _covered(at / step, visible):
                links.append((at / step, str(target)))
            at = Path("/") if target.is_absolute() else at
            rest = [*(part for part in target.parts if part != "/"), *rest]
    if not _covered(at, visible):
        raise SandboxFailure(f"image {name}: the interpreter is {at}, outside of its own prefix")
    return tuple(links)


def _covered(path: Path, directories: Iterable[Path]) -> bool:
    return any(path.is_relative_to(directory) for directory in directories)
