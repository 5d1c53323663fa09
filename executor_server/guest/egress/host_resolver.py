"""Resolves names as the host does, in threads of a bounded number."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from typing import Sequence

from .protocols import Unresolved

MAX_ADDRESSES = 16
HOST_THREADS = 32
HOST_QUEUE = 256
# For libc. It would wait for five seconds, twice, for each server; and a name that does not exist it would try again
# below the domains of the host's search list. The root as the only such domain means the name as it was checked.
_RES_VARIABLES = {"RES_OPTIONS": "timeout:2 attempts:2", "LOCALDOMAIN": "."}

_NOT_THERE = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class HostResolver:
    """Resolves as the host's programs do: with /etc/hosts and whatever else nsswitch.conf says, but no search list.

    getaddrinfo blocks and can't be interrupted, so it has threads, which are made as they are needed. They are daemon
    threads: a name server that hangs must not keep the process from ending.
    """

    def __init__(self) -> None:
        os.environ.update(_RES_VARIABLES)
        self._jobs: queue.Queue[tuple[str, asyncio.Future[list[str]]]] = queue.Queue(HOST_QUEUE)
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    async def resolve(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[str]] = loop.create_future()
        try:
            self._jobs.put_nowait((host, future))
        except queue.Full:
            raise asyncio.TimeoutError("too many names are being resolved") from None
        with self._lock:
            grows = self._idle == 0 and self._threads < HOST_THREADS
            self._threads += grows
        if grows:
            threading.Thread(target=self._work, args=(loop,), name="resolver", daemon=True).start()
        return await future

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            with self._lock:
                self._idle += 1
            host, future = self._jobs.get()
            with self._lock:
                self._idle -= 1
            if future.cancelled():  # given up while it waited; reading this without the loop can only be late
                continue
            result: list[str] | Exception
            try:
                result = _getaddrinfo(host)
            except Exception as error:  # noqa: BLE001 - whatever it is, the coroutine that waits gets it
                result = error
            try:
                loop.call_soon_threadsafe(_settle, future, result)
            except RuntimeError:  # the loop is closed
                return


def _getaddrinfo(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NOT_THERE:
            raise Unresolved("does not exist, or has no addresses") from None
        if error.errno == socket.EAI_AGAIN:
            raise asyncio.TimeoutError(error.strerror) from None
        raise Unresolved("can't be resolved") from None
    except UnicodeError:
        raise Unresolved("is no name that can be resolved") from None
    addresses = dict.fromkeys(str(sockaddr[0]) for *_, sockaddr in found)
    return list(addresses)[:MAX_ADDRESSES]


def _settle(future: asyncio.Future[list[str]], result: list[str] | Exception) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
