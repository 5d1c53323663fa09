"""smolagents' LocalPythonExecutor, as CodeAgent makes it: in this process."""

from __future__ import annotations

from collections.abc import Callable

import driver
import numpy as np
from smolagents.local_python_executor import LocalPythonExecutor


class _Sandbox(driver.Sandbox):
    streams = False

    def __init__(self) -> None:
        self._executor = LocalPythonExecutor(["numpy"])
        self._executor.send_tools({})
        self._sent = np.arange(driver.MOVED_BYTES // 8, dtype=np.float64)

    def add(self) -> None:
        assert self._executor("1+1").output == 2

    def lines(self, first: Callable[[], None]) -> None:
        result = self._executor(driver.LINES_PROGRAM)
        first()
        assert result.logs.count("\n") == driver.LINES

    def move(self) -> None:
        self._executor.send_variables({"sent": self._sent})
        assert np.array_equal(self._executor("sent").output, self._sent)

    def close(self) -> None:
        pass


class _Peer(driver.Peer):
    def cold(self) -> driver.Sandbox:
        return _Sandbox()


if __name__ == "__main__":
    driver.serve(_Peer)
