"""SWE-ReX: a DockerDeployment whose image has its server, and Python as an interactive program in a shell session."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import driver
from swerex.deployment.docker import DockerDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest, ReadFileRequest, UploadRequest

T = TypeVar("T")

_IMAGE = "remote-executor-bench/peers"
_PROMPT = ">>> "
_TIMEOUT_S = 60.0


class _Sandbox(driver.Sandbox):
    streams = False

    def __init__(self) -> None:
        # Its calls are coroutines, some of which block: with a loop for each, no client waits for another one's.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._deployment = DockerDeployment(image=_IMAGE, pull="never", docker_args=["--network", driver.NETWORK])
        try:
            self._call(self._begin())
        except BaseException:
            self.close()
            raise
        self.container = self._deployment.container_name or ""
        # Its files are read as text.
        self._sent = base64.b64encode(os.urandom(driver.MOVED_BYTES))

    async def _begin(self) -> None:
        await self._deployment.start()
        await self._deployment.runtime.create_session(CreateBashSessionRequest())
        await self._typed("python3 -q")

    def add(self) -> None:
        assert self._call(self._typed("1+1")) == "2"

    def lines(self, first: Callable[[], None]) -> None:
        one_line = " ".join(line.strip() for line in driver.LINES_PROGRAM.splitlines())
        output = self._call(self._typed(one_line + "\n"))
        first()
        assert output.count("line") == driver.LINES

    def move(self) -> None:
        with tempfile.NamedTemporaryFile(prefix="bench-", dir="/tmp") as sent:
            Path(sent.name).write_bytes(self._sent)
            self._call(self._moved(sent.name))

    async def _moved(self, path: str) -> None:
        runtime = self._deployment.runtime
        await runtime.upload(UploadRequest(source_path=path, target_path="/tmp/sent"))
        read = await runtime.read_file(ReadFileRequest(path="/tmp/sent"))
        assert base64.b64decode(read.content) == base64.b64decode(self._sent)

    def close(self) -> None:
        try:
            self._call(self._deployment.stop())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_TIMEOUT_S)
            self._loop.close()

    async def _typed(self, text: str) -> str:
        action = BashAction(command=text, is_interactive_command=True, expect=[_PROMPT], timeout=_TIMEOUT_S)
        output: str = (await self._deployment.runtime.run_in_session(action)).output
        return output

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_TIMEOUT_S)


class _Peer(driver.Peer):
    def cold(self) -> driver.Sandbox:
        return _Sandbox()


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    driver.serve(_Peer)
