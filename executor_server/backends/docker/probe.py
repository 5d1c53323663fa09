"""Examines an image by running its own Python in a container that is confined like a sandbox.

The answer comes through a socket in a shared directory, like the connection to a guest. So one short run finds out
three things: the image has a Python, the container is confined, and the Engine and the daemon see the same directories.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_server.backends.docker.containers import SOCKET_INSIDE, EndedEarly, NoSocket, make_container
from executor_server.backends.docker.engine import EngineImage
from executor_server.backends.docker.options import ContainerRequest
from executor_server.backends.docker.resources import Resources
from executor_server.backends.findings import Confinement as Finding
from executor_server.backends.findings import confinement_findings
from executor_server.backends.python_probe import UNREADABLE, WORD_CHARS, UnusablePython, printable, python_version
from executor_server.core import SandboxFailure, SandboxSpec

_COMMANDS = ("python3", "python")
_ANSWER_TIMEOUT_S = 10.0
_ANSWER_BYTES = 65_536
_PATH_CHARS = 1024
_SPEC = SandboxSpec("", memory_bytes=2**28, processes=16, disk_bytes=2**20, orphan_time_s=1.0)

# A Python of any age can run it and report its version. The answer goes to the first connection; only the daemon can
# make one, since the directories above the socket are its own.
_PROGRAM = f"""\
import json, os, socket, sys
answer = {{"implementation": getattr(getattr(sys, "implementation", None), "name", "python"),
    "version": sys.version_info[:2], "executable": sys.executable}}
if sys.version_info >= (3, 9):
    answer["user"], answer["kernel"] = os.getuid(), os.uname()[2]
    answer["writes_root"] = os.access("/", os.W_OK)
    answer["interfaces"] = [name for _, name in socket.if_nameindex()]
    answer["processes"] = [name for name in os.listdir("/proc") if name.isdigit()]
    answer["status"] = dict(line.split(None, 1) for line in open("/proc/self/status") if len(line.split()) > 1)
listener = socket.socket(socket.AF_UNIX)
listener.bind("{SOCKET_INSIDE}.new")
os.chmod("{SOCKET_INSIDE}.new", 511)
listener.listen(1)
listener.settimeout({_ANSWER_TIMEOUT_S})
os.rename("{SOCKET_INSIDE}.new", "{SOCKET_INSIDE}")
listener.accept()[0].sendall(json.dumps(answer).encode())
"""


class Unreachable(SandboxFailure):
    """The container made a socket, and the daemon can't reach it: they do not see the same directory."""


@dataclass(frozen=True)
class Confinement:
    """The report of a process in a container about the walls around it."""

    user: int
    writes_root: bool
    interfaces: tuple[str, ...]
    is_alone: bool
    has_capabilities: bool
    can_gain_privileges: bool
    is_filtered: bool
    kernel: str  # its release; empty when it is the host's

    def findings(self) -> Iterator[Finding]:
        yield "user", self.user != 0, f"Code runs as user {self.user}."
        yield "root file system", not self.writes_root, "It can write." if self.writes_root else "It is read-only."
        yield from confinement_findings(
            is_alone=self.is_alone,
            interfaces=self.interfaces,
            is_bare=not self.has_capabilities and not self.can_gain_privileges,
            is_filtered=self.is_filtered,
            own_kernel=self.kernel,
        )

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """Sentences about missing walls: with any, a container of this Engine and runtime is no sandbox."""
        return tuple(sentence for _, ok, sentence in self.findings() if not ok)


@dataclass(frozen=True)
class PreparedImage:
    """An image that sandboxes can be made of."""

    image_id: str
    volumes: tuple[str, ...]
    python: str  # the interpreter's path inside
    version: tuple[int, int]
    confinement: Confinement


@dataclass(frozen=True)
class UselessImage:
    """An image that can't serve; the reason continues a sentence that begins with the image's name."""

    reason: str


async def probe(resources: Resources, image: EngineImage) -> PreparedImage | UselessImage:
    """Runs the image's Python. Raises SandboxFailure when there is no answer and the image is not the reason."""
    facts = resources.facts
    if (image.system, image.architecture) != ("linux", facts.architecture):
        made_for = f"{image.system}/{image.architecture}"
        return UselessImage(f"is made for {made_for}, and this host is linux/{facts.architecture}")
    for command in _COMMANDS:
        try:
            return read_answer(image, facts.kernel, await _ask(resources, image, command))
        except EndedEarly as ended:
            if ended.was_killed:  # by the Engine, or for memory: the next attempt may succeed
                raise
            if not ended.could_not_begin:
                return UselessImage(f"has a Python that does not run: {ended}")
    return UselessImage("has no Python: there is neither python3 nor python on its PATH")


async def _ask(resources: Resources, image: EngineImage, command: str) -> bytes:
    async with resources.trial() as sandbox:
        request = ContainerRequest(
            image_id=image.image_id,
            image_volumes=image.volumes,
            command=(command, "-I", "-S", "-c", _PROGRAM),
            user=sandbox.user,
            spec=_SPEC,
            labels={},
        )
        await make_container(resources, sandbox, request)
        return await _receive(sandbox.endpoint.socket_path)


async def _receive(path: Path) -> bytes:
    """Reads the answer to its end, or a little past the largest allowed size. Raises Unreachable, NoSocket."""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(str(path))
    except (OSError, TimeoutError) as error:
        raise Unreachable(f"the socket that a container made in {path.parent} leads nowhere: {error}") from error
    answer = b""
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            while len(answer) <= _ANSWER_BYTES and (piece := await reader.read(_ANSWER_BYTES)):
                answer += piece
    except TimeoutError as error:
        raise NoSocket(f"its container does not come to an end with its answer in {_ANSWER_TIMEOUT_S:g} s") from error
    except OSError:  # it broke off; the part that came is checked like any other answer
        return answer
    finally:
        writer.close()
    return answer


def read_answer(image: EngineImage, host_kernel: str, answer: bytes) -> PreparedImage | UselessImage:
    """Reads the answer, which is hostile input: the image may hold any program under the name of Python."""
    try:
        if len(answer) > _ANSWER_BYTES:
            raise ValueError("too long")
        return _read(image, host_kernel, json.loads(answer))
    except UnusablePython as unusable:
        return UselessImage(str(unusable))
    except UNREADABLE:
        return UselessImage("has a Python that does not answer like one")


def _read(image: EngineImage, host_kernel: str, answer: Mapping[str, Any]) -> PreparedImage:
    version = python_version(answer)
    python, status = printable(answer["executable"], _PATH_CHARS), answer["status"]
    if not python.startswith("/"):
        raise ValueError("not the path of an interpreter")
    confinement = Confinement(
        user=int(answer["user"]),
        writes_root=bool(answer["writes_root"]),
        interfaces=tuple(printable(name) for name in answer["interfaces"]),
        is_alone=answer["processes"] == ["1"],
        has_capabilities=any(int(status[key], 16) for key in ("CapPrm:", "CapEff:", "CapBnd:")),
        can_gain_privileges=status.get("NoNewPrivs:", "").strip() != "1",
        is_filtered=status.get("Seccomp:", "").strip() == "2",
        kernel="" if answer["kernel"] == host_kernel else printable(answer["kernel"], _PATH_CHARS)[:WORD_CHARS],
    )
    return PreparedImage(image.image_id, image.volumes, python, version, confinement)
