"""Templates by the names of their images: the configured ones, and the Python in them.

A template's content is visible only inside a sandbox made from it. So the first sandbox of each is examined before the
guest is started; an unusable template is remembered for a while, since each attempt costs a sandbox.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor_server.backends.e2b.failures import CloudFailure, CommandFailed
from executor_server.backends.e2b.retry import with_retries
from executor_server.backends.python_probe import UNREADABLE, UnusablePython, printable, python_version
from executor_server.backends.settings import NO_COMMAND
from executor_server.core import ImageNotReady, SandboxFailure
from executor_server.core.config import E2BImage

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Machine

PYTHON = "python3"
"""The command, as the login shell of root finds it."""

_UNUSABLE_FOR_S = 300.0
_PROBE_TIMEOUT_S = 20.0
# It separates the answer from the greeting of a login shell.
_MARK = "executor-probe "
_PROGRAM = f"""\
import json, os, subprocess, sys
try:
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
except (ValueError, OSError):
    libc = []
if len(libc) != 2:
    try:  # the loader of musl tells its version when it is run without a program
        said = subprocess.run(["/lib/ld-musl-" + os.uname()[4] + ".so.1"], stderr=subprocess.PIPE).stderr.decode()
        libc = ["musl", said.partition("Version ")[2].split()[0]]
    except (OSError, LookupError):
        libc = ["", "0.0"]
print("\\n{_MARK}" + json.dumps({{"implementation": getattr(getattr(sys, "implementation", None), "name", "python"),
    "version": sys.version_info[:2], "machine": os.uname()[4], "user": os.getuid(),
    "libc": libc[0], "libc_version": libc[1].split(".")[:2],
    "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}}))
"""
_PROBE = f"{PYTHON} -I -S -c {shlex.quote(_PROGRAM)}"


@dataclass(frozen=True)
class Prepared:
    """A template's machines, as their own Python describes them."""

    version: tuple[int, int]
    machine: str  # as uname -m
    memory_bytes: int
    libc: str = ""  # "glibc", "musl" or, when it is another, empty
    libc_version: tuple[int, int] = (0, 0)


class NoAnswer(CloudFailure):
    """The output was not the probe's answer."""


class Templates:
    """The configured templates. They raise ImageNotReady, whose text a client may see."""

    def __init__(self, configured: Mapping[str, E2BImage]) -> None:
        self._configured = dict(configured)
        self._prepared: dict[str, Prepared] = {}
        self._unusable: dict[str, tuple[str, float]] = {}

    def of(self, image: str) -> E2BImage:
        """Returns the image. Raises ImageNotReady when it turned out to be unusable, SandboxFailure when unknown."""
        if image not in self._configured:
            raise SandboxFailure(f"no image {image!r}")
        reason, until_s = self._unusable.get(image, ("", 0.0))
        now_s = time.monotonic()
        if now_s < until_s:
            raise ImageNotReady(f"image {image!r} {reason}", retry_after_s=until_s - now_s)
        return self._configured[image]

    async def prepared(self, image: str, machine: Machine) -> Prepared:
        """Describes the image by means of `machine`, a sandbox made from it. Raises ImageNotReady, CloudFailure."""
        known = self._prepared.get(image)
        if known is None:
            try:
                known = self._prepared[image] = await probe(machine)
            except UnusablePython as unusable:
                raise self.refuse(image, str(unusable)) from None
        return known

    def known(self, image: str) -> Prepared | None:
        """Returns the description of an image, once one of its sandboxes was examined."""
        return self._prepared.get(image)

    def refuse(self, image: str, reason: str) -> ImageNotReady:
        """Remembers that it is unusable, with the reason, and returns the error to raise."""
        self._prepared.pop(image, None)
        self._unusable[image] = reason, time.monotonic() + _UNUSABLE_FOR_S
        return ImageNotReady(f"image {image!r} {reason}")

    def forget(self, image: str) -> None:
        """Drops the description of a template, which may be built again at any time."""
        self._prepared.pop(image, None)


async def probe(machine: Machine) -> Prepared:
    """Runs the machine's Python. Raises UnusablePython, CloudFailure."""

    async def ask() -> Prepared:
        output = await machine.run(_PROBE, timeout_s=_PROBE_TIMEOUT_S)
        try:
            return read_answer(output)
        except ValueError:  # retried: the answer may have been damaged on its way
            raise NoAnswer("a template's Python does not answer like one") from None

    try:
        return await with_retries(ask)
    except NoAnswer as failure:
        raise UnusablePython("has a Python that does not answer like one") from failure
    except CommandFailed as failed:
        if failed.exit_code in NO_COMMAND:
            raise UnusablePython(f"has no Python: there is no {PYTHON} on root's PATH") from failed
        raise UnusablePython(f"has a Python that does not run: it ends with exit code {failed.exit_code}") from failed


def read_answer(output: str) -> Prepared:
    """Reads the answer, which is hostile input. Raises UnusablePython; ValueError when it is no answer."""
    text = output.rpartition(f"\n{_MARK}")[2] if _MARK in output else ""
    try:
        answer = json.loads(text.partition("\n")[0])
        machine, version = printable(answer["machine"]), python_version(answer)
        if answer["user"] != 0:
            raise UnusablePython("has no root who could make a sandbox in it")
        libc = printable(answer["libc"])
        libc_version = int(answer["libc_version"][0]), int(answer["libc_version"][1])
        return Prepared(version, machine, int(answer["memory_bytes"]), libc, libc_version)
    except UNREADABLE:
        raise ValueError("not the answer of the probe") from None
