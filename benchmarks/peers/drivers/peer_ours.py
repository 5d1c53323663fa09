"""This project: a daemon of the local or the Docker backend at its defaults, and the blocking client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack

import driver
import numpy as np

from benchmarks.bench import Served, serving
from executor_client import LogEvent, Session

_REFILL_S = {"local": 0.15, "docker": 1.0}


class _Sandbox(driver.Sandbox):
    def __init__(self, session: Session, backend: str) -> None:
        self._session = session
        self.container = f"executor-{session.session_id}" if backend == "docker" else ""
        self._sent = np.arange(driver.MOVED_BYTES // 8, dtype=np.float64)

    def add(self) -> None:
        assert self._session.execute("1+1").output == 2

    def lines(self, first: Callable[[], None]) -> None:
        def on_event(event: object) -> None:
            if isinstance(event, LogEvent):
                first()

        assert self._session.execute(driver.LINES_PROGRAM, on_event=on_event).logs.count("\n") == driver.LINES

    def move(self) -> None:
        self._session.set_variables({"sent": self._sent})
        assert np.array_equal(self._session.get_variables(["sent"])["sent"], self._sent)

    def close(self) -> None:
        self._session.close()


class _Peer(driver.Peer):
    def __init__(self, backend: str) -> None:
        self._backend = backend
        self.refill_s = _REFILL_S[backend]
        self._stack = ExitStack()
        self._served: Served = self._stack.enter_context(serving(backend))

    def cold(self) -> driver.Sandbox:
        return _Sandbox(self._served.cold_session("numpy"), self._backend)

    def warm(self) -> driver.Sandbox:
        sandbox = self._served.client.create_session()
        assert sandbox.info.warm, "the pool was empty"
        return _Sandbox(sandbox, self._backend)

    def usual(self) -> driver.Sandbox:
        return _Sandbox(self._served.client.create_session(authorized_imports=["numpy"]), self._backend)

    def close(self) -> None:
        self._stack.close()


if __name__ == "__main__":
    driver.serve(lambda: _Peer(sys.argv[1]))
