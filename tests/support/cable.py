"""A connection between two machines that a test can unplug: no byte goes through, and neither is notified.

`unplug` is what a cut network looks like: connections stay open, and what is sent on them does not arrive. `plug_in`
ends that, and then arrives what was sent meanwhile, however old it is. `reset` breaks all connections.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self

_READ_BYTES = 65_536
_CONNECT_TIMEOUT_S = 5.0

Place = tuple[str, int] | str
"""A TCP address, or the path of a Unix socket."""


class Cable:
    """Relays between a port of its own and `target`, which may be away."""

    def __init__(self, target: Place, host: str = "127.0.0.1") -> None:
        self._target = target
        self._plugged = threading.Event()
        self._plugged.set()
        self._closed = False
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"

    def unplug(self) -> None:
        self._plugged.clear()

    def plug_in(self) -> None:
        self._plugged.set()

    def reset(self) -> None:
        """Breaks every connection, now."""
        with self._lock:
            broken = list(self._open)
        for end in broken:
            _break(end)

    def __enter__(self) -> Self:
        self._spawn(self._accept)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed = True
        self.plug_in()
        _break(self._listener)
        self.reset()
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _spawn(self, work: object, *args: object) -> threading.Thread:
        thread = threading.Thread(target=work, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()
        return thread

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # shut down
                return
            self._spawn(self._serve, near)

    def _serve(self, near: socket.socket) -> None:
        with near:
            self._plugged.wait()  # the other machine has not seen this connection yet
            if self._closed:
                return
            try:
                far = _connected(self._target)
            except OSError:  # it is away; the near end sees its connection end
                return
            with far:
                with self._lock:
                    self._open |= {near, far}
                if self._closed:
                    _break(near)
                up = self._spawn(self._pump, near, far)
                self._pump(far, near)
                up.join()
                with self._lock:
                    self._open -= {near, far}

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        """Relays one direction to its end, and breaks both then."""
        try:
            while data := source.recv(_READ_BYTES):
                self._plugged.wait()
                sink.sendall(data)
        except OSError:  # broken from the other side
            pass
        finally:
            self._plugged.wait()  # nor does the end of a connection go through
            _break(source)
            _break(sink)


def _connected(target: Place) -> socket.socket:
    if isinstance(target, tuple):
        end = socket.create_connection(target, timeout=_CONNECT_TIMEOUT_S)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    else:
        end = socket.socket(socket.AF_UNIX)
        end.connect(target)
    end.settimeout(None)
    return end


def _break(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # broken already
        end.shutdown(socket.SHUT_RDWR)
