"""A backend whose machine of the cloud is this host: the guest makes its namespaces, and a relay reaches it.

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

from executor_server.backends.base import HostFinding, KnownSandbox, PassiveSandbox, Sandbox
from executor_server.backends.environments import Environment, refuse_packages
from executor_server.backends.guest_archive import pack_guest
from executor_server.backends.seccomp_program import filter_program
from executor_server.backends.settings import sandbox_environment
from executor_server.core.errors import SandboxFailure
from executor_server.core.model import SandboxSpec
from executor_server.guest.wire.lines import LineDecoder, encode_lines
from executor_server.guest.wire.tokens import CHAIN_LENGTH, chained

# The machines of a cloud have one sandbox each; here they are all on one host, whose kernel counts the processes of a user
# in all of them, those of other runs of the tests included. So each has a user of its own, out of these.
_UIDS = range(2**30, 2**31)
_PIECE_BYTES = 256 * 1024


@dataclass
class NestedSandbox(PassiveSandbox):
    """Implements `Sandbox` and, as its own endpoint, `GuestEndpoint`."""

    sandbox_id: str
    socket_path: Path
    token: bytes
    uid: int
    relay: tuple[str, ...]  # the command, without socket and nonce
    relay_processes: list[asyncio.subprocess.Process]
    _carriers: set[asyncio.Task[None]]
    # Exit codes of the relays that have ended.
    exit_codes: list[int]

    backend_name: ClassVar[str] = "nested"
    fingerprint: ClassVar[str] = "nested"
    reconnect_s: ClassVar[float] = 5.0
    breaks_by_itself: ClassVar[bool] = True
    reconnects_max: ClassVar[int] = 64
    connections_max: ClassVar[int] = CHAIN_LENGTH

    @property
    def endpoint(self) -> NestedSandbox:
        return self

    @property
    def supervisor(self) -> psutil.Process | None:
        """Finds the process that has the hash of the sandbox's token on its command line: only the guest."""
        token_hash = chained(self.token, CHAIN_LENGTH).hex()
        for process in psutil.process_iter(["cmdline", "uids"]):
            is_guest = any(token_hash in part for part in process.info["cmdline"] or ())
            if is_guest and process.info["uids"].real == self.uid and _number_inside(process.pid) == 1:
                return process
        return None

    async def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        nonce = secrets.token_hex(8)
        relay = await asyncio.create_subprocess_exec(
            *self.relay, str(self.socket_path), nonce, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self.relay_processes.append(relay)
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

    async def cause_of_death(self) -> str | None:
        return None

    async def destroy(self) -> None:
        supervisor = self.supervisor
        if supervisor is not None:
            supervisor.kill()
            await asyncio.to_thread(supervisor.wait, 10)
        for relay in self.relay_processes:
            if relay.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    relay.kill()
        await asyncio.gather(*self._carriers, return_exceptions=True)


def _number_inside(pid: int) -> int:
    """Returns a process's id in its own pid namespace; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[-1])


class NestedBackend:
    """Implements `Backend`; nothing outlives it."""

    name = "nested"

    def __init__(self, directory: Path, python: Path, **overrides: Any) -> None:
        """`overrides` replace values of the configuration."""
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

    async def prepare_environment(self, spec: SandboxSpec) -> Environment | None:
        refuse_packages(spec, self.name)
        return None

    async def check_host(self) -> Sequence[HostFinding]:
        return ()

    def config(self, sandbox: NestedSandbox, spec: SandboxSpec) -> dict[str, Any]:
        return {
            "socket": str(sandbox.socket_path),
            "uid": sandbox.uid,
            "gid": sandbox.uid,
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
        """Returns a sandbox that is not started yet."""
        sandbox_id = secrets.token_hex(8)
        path = self._directory / "guests" / sandbox_id / "guest.sock"
        relay = (str(self._python), "-I", "-S", str(self._guest), "relay")
        return NestedSandbox(sandbox_id, path, secrets.token_bytes(32), secrets.choice(_UIDS), relay, [], set(), [])

    def start_command(self, config: Mapping[str, Any]) -> list[str]:
        return [str(self._python), str(self._guest), "namespaces", json.dumps(config)]

    async def run_start(self, config: Mapping[str, Any]) -> tuple[int, str]:
        """Runs the command; returns its exit code and output. The machine's root has a secret in its environment."""
        command = await asyncio.create_subprocess_exec(
            *self.start_command(config),
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
        exit_code, said = await self.run_start(self.config(sandbox, spec))
        if exit_code != 0:
            raise SandboxFailure(said)
        self.sandboxes.append(sandbox)
        return sandbox

    async def close(self) -> None:
        for sandbox in self.sandboxes:
            await sandbox.destroy()
        shutil.rmtree(self._directory / "guests", ignore_errors=True)
