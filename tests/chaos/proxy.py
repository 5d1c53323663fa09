"""A Unix socket between a client and a daemon that breaks connections: at will, or each after so many bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

_READ_BYTES = 65_536


class CuttingProxy:
    """Relays between its own socket and the daemon's. `cuts` counts the connections that it broke."""

    def __init__(self, path: Path, daemon_socket: Path) -> None:
        self.cuts = 0
        self._path = path
        self._daemon_socket = daemon_socket
        self._budgets: Iterator[int] = iter(())
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()

    @property
    def address(self) -> str:
        return f"unix:{self._path}"

    def cut_each_after(self, budgets: Iterable[int]) -> None:
        """Each coming connection is broken after so many bytes to the client; when they are used up, none any more."""
        with self._lock:
            self._budgets = iter(budgets)

    def cut(self) -> None:
        """Breaks every connection, now."""
        with self._lock:
            broken = list(self._open)
        self.cuts += len(broken) // 2
        for end in broken:
            _break(end)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _break(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join()
        self._listener.close()
        self._path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # shut down
                return
            daemon = socket.socket(socket.AF_UNIX)
            try:
                daemon.connect(str(self._daemon_socket))
            except OSError:  # it is away; the client sees its connection end
                client.close()
                daemon.close()
                continue
            with self._lock:
                self._open |= {client, daemon}
                budget = next(self._budgets, None)
            self._spawn(self._relay, client, daemon, budget)

    def _spawn(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _relay(self, client: socket.socket, daemon: socket.socket, budget: int | None) -> None:
        upstream = threading.Thread(target=_pump, args=(client, daemon, None))
        upstream.start()
        if _pump(daemon, client, budget):
            self.cuts += 1
        upstream.join()
        with self._lock:
            self._open -= {client, daemon}
        client.close()
        daemon.close()


def _pump(source: socket.socket, sink: socket.socket, budget: int | None) -> bool:
    """Relays one direction to its end, and breaks both then. Whether it was the budget that ended it."""
    try:
        while data := source.recv(_READ_BYTES if budget is None else min(budget, _READ_BYTES)):
            sink.sendall(data)
            if budget is not None:
                budget -= len(data)
                if budget == 0:
                    return True
    except OSError:  # cut from the other side
        pass
    finally:
        _break(source)
        _break(sink)
    return False


def _break(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # broken already
        end.shutdown(socket.SHUT_RDWR)
