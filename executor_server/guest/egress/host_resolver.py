"""Resolves names as the host does, in a bounded number of threads."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import threading
from typing import Dict, List, NamedTuple, Sequence, Union

from .protocols import Unresolved
from .suffixes import is_public_suffix

MAX_ADDRESSES = 16
HOST_THREADS = 32
HOST_QUEUE = 256
# Threads that names of one domain may have: a domain whose servers do not answer must not take them all.
THREADS_PER_DOMAIN = 8
# For libc, which asks its servers in turn, and accepts a late answer when it asks the same server again. With these,
# libc still gets the answer of a server that takes 9 s, alone or as one of three, and a silent server costs 3 s. A
# missing name would be tried again below the domains of the host's search list; with the root as the only such domain,
# only the checked name is tried.
_RES_VARIABLES = {"RES_OPTIONS": "timeout:3 attempts:3", "LOCALDOMAIN": "."}

_NOT_THERE = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}


class _Job(NamedTuple):
    host: str
    domain: str
    future: asyncio.Future[List[str]]


class _Domain:
    def __init__(self, turns: int) -> None:
        self.users = 0
        self.turns = asyncio.Semaphore(turns)


class DomainTurns:
    """Bounds the look-ups at one time for names of one registered domain, whose owner runs the servers for all of them.

    So servers that do not answer can't take what look-ups of all sessions share.
    """

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._domains: Dict[str, _Domain] = {}  # with look-ups, or waiting ones

    def __len__(self) -> int:
        return len(self._domains)

    async def take(self, host: str) -> str:
        """Waits for a turn. Returns the domain, for `give_back`."""
        name = _domain_of(host)
        domain = self._domains.setdefault(name, _Domain(self._turns))
        domain.users += 1
        try:
            await domain.turns.acquire()
        except BaseException:
            self._leave(name)
            raise
        return name

    def give_back(self, name: str) -> None:
        self._domains[name].turns.release()
        self._leave(name)

    def _leave(self, name: str) -> None:
        self._domains[name].users -= 1
        if not self._domains[name].users:
            del self._domains[name]


def _domain_of(host: str) -> str:
    labels = host.split(".")
    count = 3 if is_public_suffix(".".join(labels[-2:])) else 2
    return ".".join(labels[-count:])


class HostResolver:
    """Resolves as the host's programs do: with /etc/hosts and whatever else nsswitch.conf says, but no search list.

    getaddrinfo blocks and can't be interrupted, so it runs in threads, made on demand. They are daemon threads: a
    hanging name server must not keep the process from ending. The names of one domain share THREADS_PER_DOMAIN of them.
    """

    def __init__(self) -> None:
        os.environ.update(_RES_VARIABLES)
        self._jobs: queue.Queue[_Job] = queue.Queue(HOST_QUEUE)
        self.turns = DomainTurns(THREADS_PER_DOMAIN)
        self._threads = 0
        self._unfinished = 0  # jobs; idle threads can't be counted without a race

    async def resolve(self, host: str) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        job = _Job(host, await self.turns.take(host), loop.create_future())
        self._unfinished += 1
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._finish(job, asyncio.TimeoutError("too many names are being resolved"))
            return await job.future
        if self._threads < min(self._unfinished, HOST_THREADS):
            self._threads += 1
            threading.Thread(target=self._work, args=(loop,), name="resolver", daemon=True).start()
        return await job.future

    def _finish(self, job: _Job, result: Union[List[str], Exception]) -> None:
        """Ends a job. It gives its turn back when its thread is done, not when the waiter gives up, maybe earlier."""
        self._unfinished -= 1
        self.turns.give_back(job.domain)
        _settle(job.future, result)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            job = self._jobs.get()
            result: Union[List[str], Exception] = []
            try:
                if not job.future.cancelled():  # given up while it waited; outside the loop, this may only be seen late
                    result = _getaddrinfo(job.host)
            except Exception as error:  # noqa: BLE001 - whatever it is, the coroutine that waits gets it
                result = error
            try:
                loop.call_soon_threadsafe(self._finish, job, result)
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
