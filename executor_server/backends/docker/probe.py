"""What is in an image, told by its own Python from inside a container that is confined as a sandbox is.

The answer comes the way a guest is reached, by a socket in a shared directory; so that an image can serve, that it is
confined, and that the Engine and the daemon see the same directories is found out together, in one short run.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from executor_server.backends.docker.containers import SOCKET_INSIDE, EndedEarly, NoSocket, make_container
from executor_server.backends.docker.engine import EngineImage
from executor_server.backends.docker.kit import Kit
from executor_server.backends.docker.options import ContainerRequest
from executor_server.errors import SandboxFailure
from executor_server.model import SandboxSpec

OLDEST_PYTHON = (3, 9)

_COMMANDS = ("python3", "python")
_ANSWER_TIMEOUT_S = 10.0
_ANSWER_BYTES = 65_536
_PATH_CHARS = 1024
_WORD_CHARS = 32
_SPEC = SandboxSpec("", memory_bytes=2**28, processes=16, disk_bytes=2**20, orphan_time_s=1.0)

# Written so that a Python of any age can say how old it is. The answer is sent to whoever comes first, within a while.
_PROGRAM = f"""\
import json, os, socket, sys
told = {{"implementation": getattr(getattr(sys, "implementation", None), "name", "python"),
    "version": sys.version_info[:2], "executable": sys.executable}}
if sys.version_info >= (3, 9):
    told["user"], told["kernel"] = os.getuid(), os.uname()[2]
    told["writes_root"] = os.access("/", os.W_OK)
    told["interfaces"] = [name for _, name in socket.if_nameindex()]
    told["processes"] = [name for name in os.listdir("/proc") if name.isdigit()]
    told["status"] = dict(line.split(None, 1) for line in open("/proc/self/status") if len(line.split()) > 1)
listener = socket.socket(socket.AF_UNIX)
listener.bind("{SOCKET_INSIDE}.new")
os.chmod("{SOCKET_INSIDE}.new", 511)
listener.listen(1)
listener.settimeout({_ANSWER_TIMEOUT_S})
os.rename("{SOCKET_INSIDE}.new", "{SOCKET_INSIDE}")
listener.accept()[0].sendall(json.dumps(told).encode())
"""


class Unreachable(SandboxFailure):
    """The container did its part, and the daemon can't reach it: they do not see the same directory."""


@dataclass(frozen=True)
class Confinement:
    """What a process in a container of ours said of how it is confined."""

    user: int
    writes_root: bool
    interfaces: tuple[str, ...]
    is_alone: bool
    has_capabilities: bool
    can_gain_privileges: bool
    is_filtered: bool
    kernel: str  # its release; empty when it is the host's

    def findings(self) -> Iterator[tuple[str, bool, str]]:
        """(subject, whether it is as it must be, a sentence) for each thing."""
        yield "user", self.user != 0, f"Code runs as user {self.user}."
        alone = self.is_alone
        yield "process namespace", alone, "It sees its own processes only." if alone else "It sees other processes."
        cut_off = set(self.interfaces) <= {"lo"}
        yield (
            "network namespace",
            cut_off,
            "It has no network." if cut_off else f"It sees {', '.join(self.interfaces)}.",
        )
        yield "root file system", not self.writes_root, "It can write." if self.writes_root else "It is read-only."
        bare = not self.has_capabilities and not self.can_gain_privileges
        yield "privileges", bare, "It has no capabilities and can gain none." if bare else "It keeps capabilities."
        if self.kernel:  # gVisor, a virtual machine: they load no filter, and what it would protect is not there
            yield "system call filter", True, f"It has a kernel of its own ({self.kernel}), not the host's."
        else:
            filtered = self.is_filtered
            yield "system call filter", filtered, "A seccomp filter is on." if filtered else "No seccomp filter is on."

    @property
    def weaknesses(self) -> tuple[str, ...]:
        """What makes sandboxes on this Engine, with this runtime, none."""
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
    """An image that none can be made of, and why, as the rest of a sentence that begins with its name."""

    reason: str


async def probe(kit: Kit, image: EngineImage) -> PreparedImage | UselessImage:
    """Runs the image's Python. Raises SandboxFailure when it is not the image's fault that there is no answer."""
    facts = kit.facts
    if (image.system, image.architecture) != ("linux", facts.architecture):
        made_for = f"{image.system}/{image.architecture}"
        return UselessImage(f"is made for {made_for}, and this host is linux/{facts.architecture}")
    for command in _COMMANDS:
        try:
            return read_answer(image, facts.kernel, await _ask(kit, image, command))
        except EndedEarly as ended:
            if ended.was_killed:  # by the Engine, or for want of memory; another time it may not be
                raise
            if not ended.could_not_begin:
                return UselessImage(f"has a Python that does not run: {ended}")
    return UselessImage("has no Python: there is neither python3 nor python on its PATH")


async def _ask(kit: Kit, image: EngineImage, command: str) -> bytes:
    async with kit.trial() as sandbox:
        request = ContainerRequest(
            image_id=image.image_id,
            image_volumes=image.volumes,
            command=(command, "-I", "-S", "-c", _PROGRAM),
            user=sandbox.user,
            spec=_SPEC,
            labels={},
        )
        await make_container(kit, sandbox, request)
        return await _receive(sandbox.endpoint.socket_path)


async def _receive(path: Path) -> bytes:
    """All that is said, or a little more than may be said. Raises Unreachable, NoSocket."""
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
    except OSError:  # it broke off; what came is judged as any other answer
        return answer
    finally:
        writer.close()
    return answer


def read_answer(image: EngineImage, host_kernel: str, answer: bytes) -> PreparedImage | UselessImage:
    """What the image's Python said, if that is what it was."""
    try:
        if len(answer) > _ANSWER_BYTES:
            raise ValueError("too long")
        return _read(image, host_kernel, json.loads(answer))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError):
        return UselessImage("has a Python that does not answer like one")


def _read(image: EngineImage, host_kernel: str, told: Any) -> PreparedImage | UselessImage:
    implementation = _text(told["implementation"], _WORD_CHARS)
    version = (int(told["version"][0]), int(told["version"][1]))
    if implementation != "cpython" or version < OLDEST_PYTHON:
        wanted = ".".join(map(str, OLDEST_PYTHON))
        return UselessImage(f"has {implementation} {version[0]}.{version[1]}; CPython {wanted} or newer is needed")
    python, status = _text(told["executable"], _PATH_CHARS), told["status"]
    if not python.startswith("/"):
        raise ValueError("not the path of an interpreter")
    confinement = Confinement(
        user=int(told["user"]),
        writes_root=bool(told["writes_root"]),
        interfaces=tuple(_text(name, _WORD_CHARS) for name in told["interfaces"]),
        is_alone=told["processes"] == ["1"],
        has_capabilities=any(int(status[key], 16) for key in ("CapPrm:", "CapEff:", "CapBnd:")),
        can_gain_privileges=status.get("NoNewPrivs:", "").strip() != "1",
        is_filtered=status.get("Seccomp:", "").strip() == "2",
        kernel="" if told["kernel"] == host_kernel else _text(told["kernel"], _PATH_CHARS)[:_WORD_CHARS],
    )
    return PreparedImage(image.image_id, image.volumes, python, version, confinement)


def _text(told: Any, max_chars: int) -> str:
    """It is shown to people: no control characters, and nothing that no encoding has. Raises ValueError."""
    if not isinstance(told, str) or len(told) > max_chars or not told.isprintable():
        raise ValueError("not a text to show")
    return told
