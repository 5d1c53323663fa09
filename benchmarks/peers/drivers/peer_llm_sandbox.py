"""llm-sandbox: sessions of a pool of containers, and sessions that make their own.

Its environment is in the image, so it installs nothing. A run is a new process: its sessions keep files, no variables.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import driver
from llm_sandbox import SandboxSession
from llm_sandbox.pool import PoolConfig, PooledSandboxSession, create_pool_manager

_IMAGE = "remote-executor-bench/peers"
_POOLED = 4
_CONFIGS = {"network": driver.NETWORK}


class _Sandbox(driver.Sandbox):
    def __init__(self, session: Any) -> None:
        self._stack = ExitStack()
        self._session = self._stack.enter_context(session)
        backend = getattr(self._session, "backend_session", self._session)
        self.container = backend.container.id
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp")))
        (self._directory / "sent").write_bytes(os.urandom(driver.MOVED_BYTES))

    def add(self) -> None:
        assert self._session.run("print(1+1)").stdout.split() == ["2"]

    def lines(self, first: Callable[[], None]) -> None:
        result = self._session.run(driver.LINES_PROGRAM, on_stdout=lambda _text: first())
        assert result.stdout.count("line") == driver.LINES

    def move(self) -> None:
        """As a file, since it has no variables."""
        sent, received = self._directory / "sent", self._directory / "received"
        self._session.copy_to_runtime(str(sent), "/sandbox/sent")
        self._session.copy_from_runtime("/sandbox/sent", str(received))
        assert received.read_bytes() == sent.read_bytes()

    def close(self) -> None:
        self._stack.close()


class _Peer(driver.Peer):
    def __init__(self) -> None:
        self._pool = create_pool_manager(
            backend="docker",
            config=PoolConfig(max_pool_size=10, min_pool_size=_POOLED),
            lang="python",
            image=_IMAGE,
            skip_environment_setup=True,
            runtime_configs=_CONFIGS,
        )
        # It fills in the background.
        with ExitStack() as stack:
            for _ in range(_POOLED):
                stack.enter_context(PooledSandboxSession(pool_manager=self._pool)).run("print(1+1)")

    def cold(self) -> driver.Sandbox:
        return _Sandbox(
            SandboxSession(lang="python", image=_IMAGE, skip_environment_setup=True, runtime_configs=_CONFIGS)
        )

    def warm(self) -> driver.Sandbox:
        return _Sandbox(PooledSandboxSession(pool_manager=self._pool))

    def usual(self) -> driver.Sandbox:
        return self.warm()

    def close(self) -> None:
        self._pool.close()


if __name__ == "__main__":
    driver.serve(_Peer)
