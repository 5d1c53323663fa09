"""smolagents' DockerExecutor on a prebuilt Jupyter image: to build its own, it needs a registry."""

from __future__ import annotations

import socket
from collections.abc import Callable

import driver
import numpy as np
from smolagents.monitoring import AgentLogger, LogLevel
from smolagents.remote_executors import DockerExecutor

_IMAGE = "remote-executor-bench/jupyter"


class _Sandbox(driver.Sandbox):
    streams = False

    def __init__(self) -> None:
        self._executor = DockerExecutor(
            [],
            AgentLogger(level=LogLevel.OFF),
            # Needed for variables that are not JSON; with it the client also unpickles what comes out.
            allow_pickle=True,
            port=_free_port(),
            image_name=_IMAGE,
            build_new_image=False,
            container_run_kwargs={"network": driver.NETWORK},
        )
        self.container = self._executor.container.id
        self._sent = np.arange(driver.MOVED_BYTES // 8, dtype=np.float64)

    def add(self) -> None:
        assert self._executor.run_code_raise_errors("1+1").output == "2"

    def lines(self, first: Callable[[], None]) -> None:
        result = self._executor.run_code_raise_errors(driver.LINES_PROGRAM)
        first()
        assert result.logs.count("line") == driver.LINES

    def move(self) -> None:
        self._executor.send_variables({"sent": self._sent.tobytes()})
        raise driver.Cannot("10 MB came in, and there is no call that takes a variable out but a final answer")

    def close(self) -> None:
        self._executor.cleanup()
        self._executor.client.close()


class _Peer(driver.Peer):
    def cold(self) -> driver.Sandbox:
        return _Sandbox()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


if __name__ == "__main__":
    driver.serve(_Peer)
