"""One sandbox of the double: a small machine made of namespaces, and the server's end of its runner.

Bubblewrap makes the outer walls from what the local backend knows of this host: its system directories and the Python
environment of a template, read-only. `inside/runner.py` makes the machine in it. All of it dies with its first
process, and that one with ours.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor_server.backends.local.bubblewrap import find_bwrap
from executor_server.backends.local.descriptors import kill, read_within, wait_readable
from executor_server.backends.local.images import probe_image
from tests.support.e2b.wall import Wall

SYSTEM_DIRECTORIES = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
ETC_DIRECTORIES = tuple(f"/etc/{name}" for name in ("alternatives", "chromium", "chromium.d", "fonts", "ssl/certs"))
INSIDE = Path(__file__).parent / "inside"
PLACE = "/.e2b"
_RUN = f"import sys; sys.path.insert(0, {PLACE!r}); from inside.runner import main; main()"

START_TIMEOUT_S = 20.0
END_TIMEOUT_S = 10.0
FRAME_BYTES_MAX = 8 * 2**20
FILE_PIECE_BYTES = 256 * 1024
DISK_BYTES = 2 * 2**30
SUBSCRIBER_EVENTS_MAX = 256
FREEZE_TIMEOUT_S = 10.0
FREEZE_STEP_S = 0.001

_FIRST_HOST_ID = 1_900_000_000  # below what the local backend gives to sandboxes
_HOST_ID_SLOTS = 1_000
_IDS = 65_536
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROGRAMS = ("/usr/bin", "/usr/local/bin")
_ETC = {
    "passwd": "root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000::/home/user:/bin/bash\n"
    "nobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n",
    "group": "root:x:0:\nuser:x:1000:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost e2b\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "os-release": 'NAME="double"\n',
}


class MachineError(Exception):
    """A request that the machine refused; `code` is one of Connect's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class MachineMissing(Exception):
    """The machine ended, or did before."""


@dataclass
class Subscriber:
    """One stream that gets a command's output. Bounded: a reader that does not read makes the command wait."""

    events: asyncio.Queue[dict[str, Any] | None] = field(
        default_factory=lambda: asyncio.Queue(maxsize=SUBSCRIBER_EVENTS_MAX)
    )
    is_gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def put(self, event: dict[str, Any] | None) -> None:
        """Waits for room, or until the stream has ended."""
        if not self.events.full():
            self.events.put_nowait(event)
            return
        putting, gone = asyncio.ensure_future(self.events.put(event)), asyncio.ensure_future(self.is_gone.wait())
        try:
            await asyncio.wait((putting, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            putting.cancel()
            gone.cancel()


@dataclass
class Command:
    pid: int
    subscribers: list[Subscriber] = field(default_factory=list)
    pending: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)  # bounded by the runner's window
    has_ended: bool = False
    fan_out: asyncio.Task[None] | None = None


class Machine:
    """Started by `start`, ended by `destroy`; belongs to the event loop that started it."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        has_python: bool,
        outside: Mapping[str, str] | None = None,
        python: Path,
    ) -> None:
        """`outside`: addresses by their names; with it the machine reaches them through a wall."""
        self._programs = _programs_of(python)
        self._environment = environment
        self._outside = outside
        self.wall = Wall(outside or {})
        self._has_python = has_python
        self._process: subprocess.Popen[bytes] | None = None
        self._first: int | None = None  # the first process of bubblewrap's namespace, as the host numbers it
        self._first_fd: int | None = None
        self._frozen: list[int] = []
        self._commands: dict[int, Command] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last_request = 0
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ended = asyncio.Event()
        self._ending = asyncio.Lock()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    @property
    def first_pid(self) -> int | None:
        """The first process of its outer namespace, as the host numbers it."""
        return self._first

    # Life

    async def start(self) -> None:
        """Returns when the machine accepts commands. Raises MachineMissing with its last output."""
        ours, theirs = socket.socketpair()
        deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
        try:
            with theirs, tempfile.TemporaryFile() as stderr_file, tempfile.TemporaryFile() as config:
                config.write(json.dumps(self._config(theirs.fileno())).encode())
                config.seek(0)
                os.set_inheritable(theirs.fileno(), True)
                await self._spawn(theirs.fileno(), config.fileno(), stderr_file.fileno(), deadline)
                theirs.close()  # now the runner's end is the only one, and its end is seen
                reader, self._writer = await asyncio.open_unix_connection(sock=ours)
                ours = None  # type: ignore[assignment]  # the writer's from here on
                async with asyncio.timeout_at(deadline):
                    try:
                        await _read_frame(reader)
                    except (asyncio.IncompleteReadError, ConnectionError) as error:
                        stderr_file.seek(0)
                        said = stderr_file.read(10_000).decode(errors="replace").strip()
                        raise MachineMissing(f"a sandbox did not start: {said}") from error
            self._reader = asyncio.create_task(self._read(reader))
            if self._outside is not None:
                assert self._first is not None
                await self.wall.open(self._first)
        except BaseException:
            if ours is not None:
                ours.close()
            await asyncio.shield(self.destroy())
            raise

    async def _spawn(self, fd: int, config: int, stderr_file: int, deadline: float) -> None:
        info_read, info_write = os.pipe()
        try:
            # In this thread and not in a helper: the process dies with the thread that started it.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [*_bwrap_arguments(info_write, self._programs), "--", self._programs.python, "-I", "-B", "-c", _RUN],
                stdin=config,
                stdout=subprocess.DEVNULL,
                stderr=stderr_file,
                env={},
                pass_fds=(fd, info_write),
                start_new_session=True,
            )
            os.close(info_write)
            info_write = -1
            info = b""
            while b"}" not in info and (piece := await read_within(info_read, 4096, deadline)):
                info += piece
        finally:
            os.close(info_read)
            if info_write >= 0:
                os.close(info_write)
        if b"}" not in info:
            os.lseek(stderr_file, 0, os.SEEK_SET)
            raise MachineMissing(f"bubblewrap failed: {os.read(stderr_file, 10_000).decode(errors='replace').strip()}")
        self._first = int(json.loads(info)["child-pid"])
        self._first_fd = os.pidfd_open(self._first)

    def _config(self, fd: int) -> dict[str, Any]:
        programs = self._programs
        path = f"{Path(programs.python).parent}:{_SYSTEM_PATH}" if self._has_python else _SYSTEM_PATH
        return {
            "socket": fd,
            "first_id": _FIRST_HOST_ID + secrets.randbelow(_HOST_ID_SLOTS) * _IDS,
            "disk_bytes": DISK_BYTES,
            "directories": [*programs.directories, f"{PLACE}/inside"],
            "links": list(programs.links.items()),
            "hidden": [] if self._has_python else [(place, "python") for place in _PROGRAMS],
            "etc": {**_ETC, "hosts": _ETC["hosts"] + _hosts(self._outside or {})},
            "has_network": self._outside is not None,
            "environment": {"PATH": path, "LANG": "C.UTF-8", "E2B_SANDBOX": "true", **self._environment},
        }

    async def destroy(self) -> None:
        """Ends every process of the machine and waits for it. Idempotent."""
        async with self._ending:  # a second caller finds it done
            await self._destroy()

    async def _destroy(self) -> None:
        if self._process is not None and self._process.returncode is None:
            if self._first_fd is not None:
                kill(self._first_fd)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            deadline = asyncio.get_running_loop().time() + END_TIMEOUT_S
            pidfd = os.pidfd_open(self._process.pid)  # our child, not reaped yet: it exists, perhaps as a zombie
            try:
                if not await wait_readable(pidfd, deadline):
                    kill(pidfd)
                    raise MachineMissing(f"bubblewrap (process {self._process.pid}) does not end")
            finally:
                os.close(pidfd)
            self._process.wait()
        if self._first_fd is not None:
            os.close(self._first_fd)
            self._first_fd = None
        self._end()
        await self.wall.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        fan_outs = [command.fan_out for command in self._commands.values() if command.fan_out is not None]
        for task in fan_outs:
            task.cancel()
        await asyncio.gather(*fan_outs, return_exceptions=True)
        self._commands.clear()
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def wait_end(self) -> None:
        await self._ended.wait()

    async def freeze(self) -> None:
        """Stops every process of the machine, so that none can notice it except by a clock.

        Returns when all have stopped: a signal takes time, and until then they run and fork.
        """
        assert self._first is not None
        async with asyncio.timeout(FREEZE_TIMEOUT_S):
            while running := [pid for pid in _descendants(self._first) if not self._stands_still(pid)]:
                for pid in running:
                    if pid not in self._frozen:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGSTOP)
                            self._frozen.append(pid)
                await asyncio.sleep(FREEZE_STEP_S)

    def _stands_still(self, pid: int) -> bool:
        # In a wait that no signal ends (D), as of a vfork for its child, it is stopped before it runs again.
        return _state(pid) in ("tTZXD" if pid in self._frozen else "tTZX")

    def thaw(self) -> None:
        for pid in reversed(self._frozen):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._frozen = []

    # Talking with the runner

    async def ask(self, op: str, **arguments: Any) -> Any:
        """Returns the runner's answer. Raises MachineError when it refuses, MachineMissing when the runner has ended."""
        if self._writer is None or self.has_ended:
            raise MachineMissing("the sandbox has ended")
        self._last_request += 1
        number = self._last_request
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_frame({"id": number, "op": op, **arguments}))
            await self._writer.drain()
            return await answer
        except ConnectionError as error:
            raise MachineMissing("the sandbox has ended") from error
        finally:
            self._answers.pop(number, None)

    async def write_file(self, path: str, user: str, data: AsyncIterator[bytes]) -> dict[str, Any]:
        """Returns a file's entry in the answer to an upload."""
        opened: dict[str, Any] = await self.ask("open_write", path=path, user=user)
        file = opened.pop("file")
        try:
            async for piece in data:
                for at in range(0, len(piece), FILE_PIECE_BYTES):
                    part = base64.b64encode(piece[at : at + FILE_PIECE_BYTES]).decode()
                    await self.ask("write", file=file, data=part)
        finally:
            with contextlib.suppress(MachineMissing):
                await self.ask("close", file=file)
        return opened

    def unsubscribe(self, pid: int, subscriber: Subscriber) -> None:
        subscriber.is_gone.set()
        command = self._commands.get(pid)
        if command is not None and subscriber in command.subscribers:
            command.subscribers.remove(subscriber)

    async def start_command(self, **asked: Any) -> tuple[int, Subscriber]:
        command: Command = (await self.ask("start", **asked))["command"]
        return command.pid, command.subscribers[0]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(await _read_frame(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end()

    def _take(self, message: dict[str, Any]) -> None:
        if "id" not in message:
            command = self._commands.get(message["pid"])
            if command is not None:
                command.pending.put_nowait(message)
            return
        if (answer := message.get("ok")) is not None and isinstance(answer, dict) and "pid" in answer:
            # Before any other frame: the command's first output must find its stream.
            command = answer["command"] = self._commands[answer["pid"]] = Command(answer["pid"], [Subscriber()])
            command.fan_out = asyncio.create_task(self._fan_out(command))
        future = self._answers.get(message["id"])
        if future is None or future.done():
            return
        if "error" in message:
            future.set_exception(MachineError(*message["error"]))
        else:
            future.set_result(message["ok"])

    async def _fan_out(self, command: Command) -> None:
        """Gives each event to all streams, and only then acknowledges it, so that the runner sends another."""
        while True:
            event = await command.pending.get()
            is_end = "end" in event
            if is_end:
                command.has_ended = True
                self._commands.pop(command.pid, None)
            for subscriber in list(command.subscribers):
                await subscriber.put(event)
            if is_end:
                return
            if self._writer is not None:
                self._writer.write(_frame({"op": "ack", "pid": command.pid}))

    def _end(self) -> None:
        self._ended.set()
        for future in self._answers.values():
            if not future.done():
                future.set_exception(MachineMissing("the sandbox has ended"))


def _frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data


async def _read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > FRAME_BYTES_MAX:
        raise ConnectionError(f"a frame of {size} bytes")
    message: dict[str, Any] = json.loads(await reader.readexactly(size))
    return message


@dataclass(frozen=True)
class _Programs:
    """The read-only part of a machine's files, by the paths in it."""

    python: str
    directories: Mapping[str, str]  # to the directories of this host
    links: Mapping[str, str]  # to their targets


@functools.cache
def _programs_of(python: Path) -> _Programs:
    """Returns this host's system, and the environment of an interpreter."""
    image = probe_image("double", python)
    places = {name: Path(name) for name in (*SYSTEM_DIRECTORIES, *ETC_DIRECTORIES)}
    directories = {name: name for name, place in places.items() if place.is_dir() and not place.is_symlink()}
    links = {name: str(place.readlink()) for name, place in places.items() if place.is_symlink()}
    directories |= {str(place): str(place) for place in image.directories}
    return _Programs(str(image.python), directories, {**links, **{str(a): str(b) for a, b in image.links}})


def _hosts(addresses: Mapping[str, str]) -> str:
    return "".join(f"{address} {name}\n" for name, address in addresses.items())


def _bwrap_arguments(info_fd: int, programs: _Programs) -> Iterator[str]:
    yield from (str(find_bwrap().path), "--info-fd", str(info_fd), "--die-with-parent", "--as-pid-1", "--new-session")
    yield from ("--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--unshare-net")
    # The machine's root has no rights here: the directories above its files must be open to all.
    places = map(Path, (f"{PLACE}/inside", *programs.directories, *programs.links))
    for parent in sorted({parent for place in places for parent in place.parents} - {Path("/")}):
        if str(parent) not in programs.directories:
            yield from ("--perms", "0755", "--dir", str(parent))
    for name, place in sorted(programs.directories.items()):
        yield from ("--ro-bind", place, name)
    for name, target in programs.links.items():
        yield from ("--symlink", target, name)
    yield from ("--ro-bind", str(INSIDE), f"{PLACE}/inside", "--dir", "/proc", "--dir", "/dev")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        yield from ("--dev-bind", f"/dev/{name}", f"/dev/{name}")
    yield from ("--dir", "/machine", "--chdir", "/")


def _descendants(pid: int) -> list[int]:
    """Returns a process and all its descendants, parents first."""
    found = [pid]
    for each in found:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{each}/task").iterdir():
                found.extend(map(int, (task / "children").read_text().split()))
    return found


def _state(pid: int) -> str:
    """Returns the state letter of /proc; X for a process that has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
