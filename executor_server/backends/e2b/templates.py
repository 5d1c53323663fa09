"""Templates by the names of their images: which ones are configured, and what Python is in them.

What is in a template shows in a sandbox of it only. So the first sandbox of each is asked before the guest is started;
a template that has no use is remembered for a while, since each try costs a sandbox.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from executor_server.backend_config import E2BImage
from executor_server.backends.e2b.failures import CloudFailure, CommandFailed
from executor_server.backends.e2b.patience import patiently
from executor_server.errors import ImageNotReady, SandboxFailure

if TYPE_CHECKING:
    from executor_server.backends.e2b.cloud import Machine

PYTHON = "python3"
"""As the login shell of root finds it."""
OLDEST_PYTHON = (3, 9)

_USELESS_FOR_S = 300.0
_PROBE_TIMEOUT_S = 20.0
_NO_COMMAND = (126, 127)
_WORD_CHARS = 32
# What a login shell says before it is told apart by this.
_MARK = "executor-probe "
_PROGRAM = f"""\
import json, os, sys
print("\\n{_MARK}" + json.dumps({{"implementation": getattr(getattr(sys, "implementation", None), "name", "python"),
    "version": sys.version_info[:2], "machine": os.uname()[4], "user": os.getuid(),
    "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}}))
"""
_PROBE = f"{PYTHON} -I -S -c {shlex.quote(_PROGRAM)}"


@dataclass(frozen=True)
class Prepared:
    """What a template's machines are, as its own Python says."""

    version: tuple[int, int]
    machine: str  # as uname -m
    memory_bytes: int


class Useless(Exception):
    """No sandbox can be made of it; the text is the rest of a sentence that begins with its name."""


class NoAnswer(CloudFailure):
    """What came was not the probe's answer."""


class Templates:
    """The configured ones. Its refusals are ImageNotReady, which name no more than a client may know."""

    def __init__(self, configured: Mapping[str, E2BImage]) -> None:
        self._configured = dict(configured)
        self._prepared: dict[str, Prepared] = {}
        self._useless: dict[str, tuple[str, float]] = {}

    def of(self, image: str) -> E2BImage:
        """Raises ImageNotReady when it turned out to be of no use, SandboxFailure when there is no such image."""
        if image not in self._configured:
            raise SandboxFailure(f"no image {image!r}")
        reason, until_s = self._useless.get(image, ("", 0.0))
        now_s = time.monotonic()
        if now_s < until_s:
            raise ImageNotReady(f"image {image!r} {reason}", retry_after_s=until_s - now_s)
        return self._configured[image]

    async def prepared(self, image: str, machine: Machine) -> Prepared:
        """What `machine`, a sandbox of the image, is. Raises ImageNotReady, CloudFailure."""
        known = self._prepared.get(image)
        if known is None:
            try:
                known = self._prepared[image] = await probe(machine)
            except Useless as useless:
                raise self.refuse(image, str(useless)) from None
        return known

    def refuse(self, image: str, reason: str) -> ImageNotReady:
        """Remembers that it is of no use, and why; what to raise."""
        self._prepared.pop(image, None)
        self._useless[image] = reason, time.monotonic() + _USELESS_FOR_S
        return ImageNotReady(f"image {image!r} {reason}")

    def forget(self, image: str) -> None:
        """A template may be built anew at any time, and what was found may not hold any more."""
        self._prepared.pop(image, None)


async def probe(machine: Machine) -> Prepared:
    """Asks the machine's Python. Raises Useless, CloudFailure."""

    async def ask() -> Prepared:
        said = await machine.run(_PROBE, timeout_s=_PROBE_TIMEOUT_S)
        try:
            return read_answer(said)
        except ValueError:  # or what it says was damaged on its way
            raise NoAnswer("a template's Python does not answer like one") from None

    try:
        return await patiently(ask)
    except NoAnswer as failure:
        raise Useless("has a Python that does not answer like one") from failure
    except CommandFailed as failed:
        if failed.exit_code in _NO_COMMAND:
            raise Useless(f"has no Python: there is no {PYTHON} on root's PATH") from failed
        raise Useless(f"has a Python that does not run: it ends with exit code {failed.exit_code}") from failed


def read_answer(said: str) -> Prepared:
    """Raises Useless; ValueError when it is none."""
    answer = said.rpartition(f"\n{_MARK}")[2] if _MARK in said else ""
    try:
        return _read(json.loads(answer.partition("\n")[0]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        raise ValueError("not the answer of the probe") from None


def _read(told: Any) -> Prepared:
    implementation, machine = _word(told["implementation"]), _word(told["machine"])
    version = (int(told["version"][0]), int(told["version"][1]))
    if implementation != "cpython" or version < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        raise Useless(f"has {implementation} {version[0]}.{version[1]}; CPython {wanted} or newer is needed")
    if told["user"] != 0:
        raise Useless("has no root who could make a sandbox in it")
    return Prepared(version, machine, int(told["memory_bytes"]))


def _word(told: Any) -> str:
    """It is shown to people. Raises ValueError."""
    if not isinstance(told, str) or len(told) > _WORD_CHARS or not told.isprintable():
        raise ValueError("not a word to show")
    return told
