"""Jupyter kernels in sandboxes: a provisioner that runs the real ipykernel in a session.

A kernelspec names it; `executor jupyter install` writes one. The kernel listens on five ports of its sandbox, which are
forwarded to ports of this machine, where Jupyter connects as to any local kernel.

A forwarded connection that breaks, for example because the daemon restarts, may have lost output of a cell. The kernel
then counts as dead, and nothing more of it is shown. A restart of the kernel continues in the same session with its
files, or in a new one if the session is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import uuid
from typing import Any

from jupyter_client.provisioning import KernelProvisionerBase
from traitlets import Dict, Int

from executor_client import AsyncPortForward, AsyncProcess, AsyncSession, ProcessOutput, SessionState
from executor_client.errors import (
    ExecutorClientError,
    NotFoundError,
    PreconditionError,
    ResourceExhaustedError,
    SessionGone,
)
from executor_client.integrations._common import SessionOptions, attached_session, in_background, text

_PORTS = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
_FILE = "/tmp/.jupyter-kernel.json"
# ipykernel does not show the figures of the sandbox's own backend. The workspace is for the user's files.
_ENVIRONMENT = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "IPYTHONDIR": "/tmp/.ipython"}
_START_TIMEOUT_S = 60.0
_LOOK_S = 0.05
_OUTPUT_END_BYTES = 2000
_UNKNOWN_EXIT = 1


class RemoteProvisioner(KernelProvisionerBase):
    """Runs a kernelspec's command in a session of the daemon. The session ends with the kernel, or with this process.

    All kernels use the background loop: a blocking KernelManager's own loop runs only during its calls.

    `metadata.kernel_provisioner.config` of the kernelspec sets its traits.
    """

    options = Dict(help="The fields of SessionOptions: image, limits, idle_time_s, network, packages, env, ...")
    first_port = Int(52_000, help="The first of five ports that the kernel listens on in its sandbox.")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._session: AsyncSession | None = None
        self._process: AsyncProcess | None = None
        self._following: asyncio.Task[None] | None = None
        self._output_end = b""
        self._forwards: list[AsyncPortForward] = []
        self._broken: asyncio.Task[None] | None = None  # closes the forwards, after a connection broke
        self._local_ports = dict.fromkeys(_PORTS, 0)  # clients know them, so a restart keeps them
        self._key = getattr(getattr(self.parent, "session", None), "key", b"") or uuid.uuid4().hex.encode()

    @property
    def has_process(self) -> bool:
        return self._process is not None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        # Not the manager's `format_kernel_cmd`, which inserts this machine's Python and connection file.
        arguments = [*self.kernel_spec.argv, *kwargs.pop("extra_arguments", ())]
        command = [each.replace("{connection_file}", _FILE) for each in arguments]
        launch: dict[str, Any] = await super().pre_launch(cmd=command, **kwargs)
        return launch

    async def launch_kernel(self, cmd: list[str], **kwargs: Any) -> dict[str, Any]:
        try:
            await in_background(self._launch(cmd))
        except BaseException:
            await in_background(self._end())
            raise
        self.connection_info = self._connection(self._local_ports)
        return self.connection_info

    def _connection(self, ports: dict[str, int]) -> dict[str, Any]:
        signing = {"key": self._key, "signature_scheme": "hmac-sha256"}
        return {"transport": "tcp", "ip": "127.0.0.1", **ports, **signing}

    async def _launch(self, command: list[str]) -> None:
        await self._stop()
        await self._close_forwards()  # so that the last kernel's connections report no late errors
        if self._broken is not None:
            await self._broken
        session = self._session = await self._usable_session()
        ports = {name: self.first_port + number for number, name in enumerate(_PORTS)}
        connection = json.dumps({**self._connection(ports), "key": self._key.decode()})
        await session.files.write(_FILE, connection.encode(), mode=0o600)
        self._output_end, self._broken = b"", None
        env = {**_ENVIRONMENT, **self.kernel_spec.env}  # without this machine's variables
        self._process = await session.processes.start(command, env=env, merge_stderr=True)
        self._following = asyncio.create_task(self._follow(self._process))
        await asyncio.wait_for(self._listening(session, self._following, ports["hb_port"]), _START_TIMEOUT_S)
        for name, port in ports.items():
            local_port = self._local_ports[name]
            forward = await session.ports.forward(port, local_port=local_port, on_error=self._note_error)
            self._forwards.append(forward)
            self._local_ports[name] = forward.local_port

    async def _usable_session(self) -> AsyncSession:
        """Returns the existing session, or a new one if it is gone."""
        if self._session is not None:
            with contextlib.suppress(SessionGone):
                if (await self._session.refresh()).state is not SessionState.LOST:
                    return self._session
        return await attached_session(SessionOptions(**self.options), framework="jupyter")

    async def _listening(self, session: AsyncSession, following: asyncio.Task[None], port: int) -> None:
        """Waits until the kernel listens, so that no client connects in vain. Raises RuntimeError if it ends."""
        while True:
            try:
                _, writer = await session.ports.connect(port)
                writer.close()
                return
            except PreconditionError as error:
                if error.reason != "PORT_CLOSED":
                    raise
                if following.done():
                    said = text(self._output_end).strip()
                    raise RuntimeError(
                        f"the kernel ended at once: {said}. If the image lacks ipykernel, install it there, or make "
                        "the kernel with `executor jupyter install --with ipykernel`, or with `--forwarding`"
                    ) from error
            await asyncio.sleep(_LOOK_S)

    async def _follow(self, process: AsyncProcess) -> None:
        try:
            async for event in process:
                if isinstance(event, ProcessOutput):
                    self._output_end = (self._output_end + event.data)[-_OUTPUT_END_BYTES:]
        except ExecutorClientError as error:
            self.log.error("the kernel can't be followed any more: %s", error)

    def _note_error(self, error: ExecutorClientError) -> None:
        # A connection that could not be opened has lost nothing.
        if self._broken is None and error.reason != "PORT_CLOSED" and not isinstance(error, ResourceExhaustedError):
            self.log.error("a connection to the kernel broke, so output may be missing: %s", error)
            self._broken = asyncio.create_task(self._close_forwards())

    async def poll(self) -> int | None:
        if self._process is None or self._following is None:
            return 0
        if self._broken is None and not self._following.done():
            return None
        result = self._process.result
        return _UNKNOWN_EXIT if result is None or result.exit_code is None else result.exit_code

    async def wait(self) -> int | None:
        while (code := await self.poll()) is None:  # noqa: ASYNC110 - its end is noticed in another loop
            await asyncio.sleep(_LOOK_S)
        self._process = None
        return code

    async def send_signal(self, signum: int) -> None:
        if self._process is not None and signum != 0:
            await in_background(self._process.signal(signum))

    async def kill(self, restart: bool = False) -> None:
        await in_background(self._stop())

    async def terminate(self, restart: bool = False) -> None:
        await self.send_signal(signal.SIGTERM)

    async def cleanup(self, restart: bool = False) -> None:
        if not restart:
            await in_background(self._end())

    async def _stop(self) -> None:
        """Kills the kernel with all its processes, if it runs, and waits for its end."""
        process, following = self._process, self._following
        if process is not None and following is not None and process.result is None:
            with contextlib.suppress(NotFoundError):
                await process.kill()
                await (process.wait(_START_TIMEOUT_S) if following.done() else following)

    async def _close_forwards(self) -> None:
        forwards, self._forwards = self._forwards, []
        await asyncio.gather(*(each.close() for each in forwards))

    async def _end(self) -> None:
        await self._close_forwards()
        session, self._session, self._process = self._session, None, None
        if session is not None:
            await session.close()
