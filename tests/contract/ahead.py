"""Images that import modules before a program needs them, for a daemon in this process or the nodes of a fleet."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil

from executor_server.guest.interpreter.own_process import OOM_SCORE
from executor_server.sessions import Session
from tests.contract.harness import Harness, harness_on
from tests.contract.wire import Front, harness_of
from tests.support.polling import eventually_async

# Modules of an environment of the tests. `good` comes last: its effect shows that the others have ended.
MODULES = {
    "good": "import _decimal\nvalue = 1",
    "raises": "raise ValueError('no')",
    "exits": "import sys\nsys.exit(3)",
    "dies": "import os\nos._exit(3)",
    "forks": "import os\nif os.fork() == 0:\n    raise SystemExit",
    "prints": "import ctypes, os, sys\nprint('a')\nsys.__stdout__.write('b')\nsys.stderr.write('c')\n"
    "os.write(1, b'd')\nctypes.CDLL(None).puts(b'e')\nsys.stdout = None",
    "spins": "import time\nwhile time.process_time() < 1:\n    pass\nimport _decimal",
    "hangs": "while True:\n    pass",
}
HARMFUL = ("missing", "raises", "exits", "dies", "forks", "prints", "good")
AHEAD: Mapping[str, tuple[str, ...]] = {
    "ahead-numpy": ("numpy",),
    "ahead-harmful": HARMFUL,
    "ahead-good": ("good",),
    "ahead-spins": ("spins",),
    "ahead-hangs": ("hangs",),
}
"""Images, and the modules that they import ahead. All but the first have the modules above."""


@contextmanager
def python_with_modules() -> Iterator[Path]:
    """The interpreter of a virtual environment with these modules."""
    directory = Path(tempfile.mkdtemp(prefix="c-env-"))
    directory.chmod(0o755)
    packages = directory / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (directory / "bin").mkdir()
    base = Path(os.path.realpath(sys.executable))
    (directory / "bin/python").symlink_to(base)
    (directory / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for name, source in MODULES.items():
        (packages / f"{name}.py").write_text(source)
    yield directory / "bin/python"
    shutil.rmtree(directory)


def python_of(image: str, with_modules: Path) -> Path:
    return Path(sys.executable) if image == "ahead-numpy" else with_modules


@asynccontextmanager
async def ahead(image: str, with_modules: Path, front: Front | None) -> AsyncIterator[Harness]:
    """A harness whose sessions have this image; behind `front` where there is one."""
    if front is None:
        async with harness_on(python_of(image, with_modules), preload=AHEAD[image]) as harness:
            yield harness
        return
    async with harness_of("", front, image=image) as wire:
        yield wire


async def imported(harness: Harness, session: Session, library: str) -> None:
    """Waits until the session's interpreter has this library, and is ready."""
    assert await eventually_async(lambda: has_imported(harness.processes(session), library))


def has_imported(found: list[psutil.Process], library: str) -> bool:
    """True when each interpreter has the library: the one that did not import ahead has ended.

    Only an interpreter has this score; a checker comes and goes as it pleases.
    """
    interpreters = [each for each in found if _read(each, "oom_score_adj").strip() == str(OOM_SCORE)]
    return bool(interpreters) and all(library in _read(each, "maps") for each in interpreters)


def _read(process: psutil.Process, name: str) -> str:
    try:
        return Path(f"/proc/{process.pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
