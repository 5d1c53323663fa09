"""A Jupyter kernel that this process starts, spoken to by the blocking client of jupyter_client."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import driver
import numpy as np
from jupyter_client.manager import start_new_kernel

_TIMEOUT_S = 60.0


class _Sandbox(driver.Sandbox):
    def __init__(self) -> None:
        self._manager, self._client = start_new_kernel(kernel_name="python3", startup_timeout=_TIMEOUT_S)
        self._sent = np.arange(driver.MOVED_BYTES // 8, dtype=np.float64).tobytes()

    def add(self) -> None:
        assert self._run("1+1") == {"text/plain": "2"}

    def lines(self, first: Callable[[], None]) -> None:
        seen: list[str] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "stream":
                first()
                seen.append(message["content"]["text"])

        self._execute(driver.LINES_PROGRAM, hook)
        assert "".join(seen).count("\n") == driver.LINES

    def move(self) -> None:
        """As text in the code and in the value, since the protocol carries no other data of a program."""
        self._run(f"import base64; sent = base64.b64decode('{base64.b64encode(self._sent).decode()}')")
        output = self._run("base64.b64encode(sent).decode()")
        assert base64.b64decode(output["text/plain"].strip("'")) == self._sent

    def close(self) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)

    def _run(self, code: str) -> dict[str, str]:
        values: list[dict[str, str]] = []

        def hook(message: dict[str, Any]) -> None:
            if message["msg_type"] == "execute_result":
                values.append(message["content"]["data"])

        self._execute(code, hook)
        return values[0] if values else {}

    def _execute(self, code: str, hook: Callable[[dict[str, Any]], None]) -> None:
        reply = self._client.execute_interactive(code, output_hook=hook, timeout=_TIMEOUT_S, store_history=False)
        assert reply["content"]["status"] == "ok", reply["content"]


class _Peer(driver.Peer):
    def cold(self) -> driver.Sandbox:
        return _Sandbox()


if __name__ == "__main__":
    driver.serve(_Peer)
