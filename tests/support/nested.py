"""A backend whose machine of the cloud is this one: sandboxes made by `guest nest`, reached by `guest relay`.

Needs root. What a cloud has between the daemon and the commands' streams is not here: they are this process's pipes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil

from executor_server.backends.base import HostFinding, KnownSandbox, Sandbox
from executor_server.backends.environment import sandbox_environment
from executor_server.backends.seccomp_program import filter_program
from executor_server.errors import SandboxFailure
from executor_server.guest.lines import LineDecoder, encode_lines
from executor_server.guest.tokens import CHAIN_LENGTH, chained
from executor_server.guest_archive import pack_guest
from executor_server.model import SandboxSpec

NEST_UID = 65_533
_PIECE_BYTES = 256 * 1024


@dataclass
class NestedSandbox:
    """Implements `Sandbox` and, being its own way to its guest, `GuestEndpoint`."""

    sandbox_id: str
    socket_path: Path
    token: bytes
    relay: tuple[str, ...]  # the command, but for socket and nonce
    relays: list[asyncio.subprocess.Process]
    _carriers: set[asyncio.Task[None]]
    # Of the relays that have ended.
    exit_codes: list[int]

    backend_name: ClassVar[str] = "nested"
    fingerprint: ClassVar[str] = "nested"
    pause_idle_s: ClassVar[None] = None
    reconnect_s: ClassVar[float] = 5.0
    breaks_by_itself: ClassVar[bool] = True
    reconnects_max: ClassVar[int] = 64
    connections_max: ClassVar[int] = CHAIN_LENGTH

    @property
    def endpoint(self) -> NestedSandbox:
        return self

    @property
    def supervisor(self) -> psutil.Process | None:
        """The guest is told the hash of its token on its command line; so is nobody else."""
        token_hash = chained(self.token, CHAIN_LENGTH).hex()
        for process in psutil.process_iter(["cmdline", "uids"]):
            told = any(token_hash in part for part in process.info["cmdline"] or ())
            if told and process.info["uids"].real == NEST_UID and _number_inside(process.pid) == 1:
                return process
        return None

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        nonce = secrets.token_hex(8)
        relay = await asyncio.create_subprocess_exec(
            *self.relay, str(self.socket_path), nonce, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self.relays.append(relay)
        ours, theirs = socket.socketpair()
        loop = asyncio.get_running_loop()
        carrier = loop.create_task(self._carry(relay, nonce, theirs))
        self._carriers.add(carrier)
        carrier.add_done_callback(self._carriers.discard)
        await loop.create_connection(make_protocol, sock=ours)

    async def _carry(self, relay: asyncio.subprocess.Process, nonce: str, end: socket.socket) -> None:
        assert relay.stdin is not None and relay.stdout is not None
        reader, writer = await asyncio.open_connection(sock=end)
        decoder = LineDecoder(nonce)

        async def to_relay() -> None:
            assert relay.stdin is not None
            seq = 1
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(_PIECE_BYTES):
                    lines, seq = encode_lines(data, seq)
                    relay.stdin.write(lines)
                    await relay.stdin.drain()
            relay.stdin.close()

        sending = asyncio.create_task(to_relay())
        try:
            with contextlib.suppress(ConnectionError):
                while data := await relay.stdout.read(_PIECE_BYTES):
                    for piece in decoder.feed(data):
                        writer.write(piece)
                    await writer.drain()
        finally:
            writer.close()
            await asyncio.gather(sending, return_exceptions=True)
            self.exit_codes.append(await relay.wait())

    async def oom_kills(self) -> int | None:
        return None

    async def cause_of_death(self) -> str | None:
        return None

    async def label(self, session_id: str) -> None:
        return

    def set_cpu_share(self, share: float) -> None:
        return

    async def pause(self) -> bool:
        return False

    async def wake(self) -> None:
        return

    async def destroy(self) -> None:
        supervisor = self.supervisor
        if supervisor is not None:
            supervisor.kill()
            await asyncio.to_thread(supervisor.wait, 10)
        for relay in self.relays:
            if relay.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    relay.kill()
        await asyncio.gather(*self._carriers, return_exceptions=True)


def _number_inside(pid: int) -> int:
    """Of a process in its own pid namespace; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


class NestedBackend:
    """Implements `Backend`; nothing outlives it."""

    name = "nested"

    def __init__(self, directory: Path, python: Path, **overrides: Any) -> None:
        """`overrides` are of nest's configuration."""
        self._directory = directory
        self._python = python
        self._overrides = overrides
        self._guest = pack_guest(directory).path
        self.sandboxes: list[NestedSandbox] = []

    async def start(self) -> None:
        assert os.geteuid() == 0

    async def adopt(self, known: Sequence[KnownSandbox]) -> Mapping[str, Sandbox]:
        return {}

    async def sweep(self) -> int:
        return 0

    async def fingerprint(self, spec: SandboxSpec) -> str:
        return "nested"

    async def check_host(self) -> Sequence[HostFinding]:
        return ()

    def config(self, sandbox: NestedSandbox, spec: SandboxSpec) -> dict[str, Any]:
        return {
            "socket": str(sandbox.socket_path),
            "uid": NEST_UID,
            "gid": NEST_UID,
            "environment": sandbox_environment(spec.processes),
            "processes": spec.processes,
            "disk_bytes": spec.disk_bytes,
            "max_files": spec.max_files,
            "shm_bytes": min(spec.disk_bytes, spec.memory_bytes // 2),
            "seccomp": base64.b64encode(filter_program()).decode(),
            "guest": {
                "token_hash": chained(sandbox.token, CHAIN_LENGTH).hex(),
                "workspace": "/workspace",
                "orphan_time_s": spec.orphan_time_s,
                "memory_bytes": spec.memory_bytes,
                "processes": spec.processes,
                "watch_memory": True,
                "preload": [],
            },
            **self._overrides,
        }

    def new_sandbox(self) -> NestedSandbox:
        """One that does not exist yet."""
        sandbox_id = secrets.token_hex(8)
        path = self._directory / "nests" / sandbox_id / "guest.sock"
        relay = (str(self._python), "-I", "-S", str(self._guest), "relay")
        return NestedSandbox(sandbox_id, path, secrets.token_bytes(32), relay, [], set(), [])

    def nest_command(self, config: Mapping[str, Any]) -> list[str]:
        return [str(self._python), str(self._guest), "nest", json.dumps(config)]

    async def nest(self, config: Mapping[str, Any]) -> tuple[int, str]:
        """Runs the command: its exit code, and what it says. The machine's root has a secret in its environment."""
        command = await asyncio.create_subprocess_exec(
            *self.nest_command(config),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.defpath, "CLOUD_SECRET": "of the machine"},
        )
        printed, said = await command.communicate()
        assert printed == b""
        assert command.returncode is not None
        return command.returncode, said.decode()

    async def create(self, spec: SandboxSpec) -> NestedSandbox:
        sandbox = self.new_sandbox()
        exit_code, said = await self.nest(self.config(sandbox, spec))
        if exit_code != 0:
            raise SandboxFailure(said)
        self.sandboxes.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.sandboxes:
            await sandbox.destroy()
        shutil.rmtree(self._directory / "nests", ignore_errors=True)
