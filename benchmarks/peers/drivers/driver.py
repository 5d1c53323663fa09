"""Measures one peer, in the peer's own environment: `benchmarks.peers` asks for rows, a line of JSON each.

It imports the standard library and psutil alone, and nothing of this project.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import psutil

LINES = 1_000
LINES_PROGRAM = f"for number in range({LINES}):\n    print('line', number)"
MOVED_BYTES = 10_000_000
NETWORK = os.environ.get("BENCH_NETWORK", "")
"""The name of a network of the Engine's, for a container that is reached over a port."""

_CLIENTS = 4
_CROWD = 4
_MIB = 1024 * 1024
_DOCKER_TIMEOUT_S = 60.0
_REASON_CHARS = 300


class Cannot(Exception):
    """The peer has no such thing; the message says how that is known."""


class Sandbox(ABC):
    """A sandbox of a peer: an executor, a session, a kernel."""

    @abstractmethod
    def add(self) -> None:
        """Runs `1+1`, and ensures that the answer is 2."""

    @abstractmethod
    def lines(self, first: Callable[[], None]) -> None:
        """Runs LINES_PROGRAM, calls `first` when there is a line, and ensures that there are all of them at the end."""

    @abstractmethod
    def move(self) -> None:
        """Takes MOVED_BYTES bytes in, and out again, and ensures that they are the same."""

    @abstractmethod
    def close(self) -> None: ...

    streams = True
    """False when all output comes at the end."""
    container = ""
    """The Engine's name for its container."""


class Peer(ABC):
    """Makes a peer's sandboxes."""

    refill_s = 0.0
    """Seconds for a pool to make another."""

    @abstractmethod
    def cold(self) -> Sandbox:
        """One that is made on the spot."""

    def warm(self) -> Sandbox:
        """One that a pool has ready."""
        raise Cannot("it has no pool")

    def usual(self) -> Sandbox:
        """One as a program gets it that makes many."""
        return self.cold()

    def close(self) -> None:
        return None


def serve(make: Callable[[], Peer]) -> None:
    """Answers requests until there are none."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a peer may print, which must not mix with answers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with ExitStack() as stack:
        rows = _Rows(stack.enter_context(closing(make())), stack)
        for line in sys.stdin:
            request = json.loads(line)
            try:
                answer: dict[str, Any] = {"figures": rows.measure(request["row"], request["count"])}
            except Cannot as reason:
                answer = {"cannot": str(reason)}
            except Exception as error:  # noqa: BLE001 - any code of any peer; the other rows are measured all the same
                answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:_REASON_CHARS]}
                rows.drop()
            print(json.dumps(answer), file=answers)


class _Rows:
    """The rows, over one sandbox that is kept where a row needs one, and over new ones elsewhere."""

    def __init__(self, peer: Peer, stack: ExitStack) -> None:
        self._peer = peer
        self._kept: Sandbox | None = None
        stack.callback(self.drop)

    def measure(self, row: str, count: int) -> dict[str, list[float]]:
        return {
            "version": self._version,
            "cold": self._cold,
            "warm": self._warm,
            "add": self._add,
            "lines": self._lines,
            "move": self._move,
            "lives": self._lives,
            "memory": self._memory,
        }[row](count)

    def drop(self) -> None:
        """Closes the kept sandbox, so that the next row begins with a new one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _version(self, _count: int) -> dict[str, list[float]]:
        return {"python": [float(part) for part in platform.python_version_tuple()]}

    def _cold(self, count: int) -> dict[str, list[float]]:
        return {"ready, cold": [_life_ms(self._peer.cold) for _ in range(count)]}

    def _warm(self, count: int) -> dict[str, list[float]]:
        samples = []
        for _ in range(count):
            time.sleep(self._peer.refill_s)
            samples.append(_life_ms(self._peer.warm))
        return {"ready, warm": samples}

    def _add(self, count: int) -> dict[str, list[float]]:
        sandbox = self._one()
        return {"1+1": [_ms(sandbox.add) for _ in range(count)]}

    def _lines(self, count: int) -> dict[str, list[float]]:
        sandbox = self._one()
        first_ms, all_ms = [], []
        for _ in range(count):
            first_one_ms, took_ms = _lines_ms(sandbox)
            first_ms.append(first_one_ms)
            all_ms.append(took_ms)
        figures = {"first of 1,000 lines": first_ms, "1,000 lines": all_ms}
        return figures if sandbox.streams else {"1,000 lines": all_ms}

    def _move(self, count: int) -> dict[str, list[float]]:
        sandbox = self._one()
        return {"10 MB in + out": [_ms(sandbox.move) for _ in range(count)]}

    def _lives(self, count: int) -> dict[str, list[float]]:
        """Made, used once and closed, by four clients at a time."""
        with ThreadPoolExecutor(_CLIENTS) as clients:
            began = time.perf_counter()
            lives = [clients.submit(_life_ms, self._peer.usual) for _ in range(_CLIENTS * count)]
            for each in lives:
                each.result()
            return {"lives, 4 clients": [len(lives) / (time.perf_counter() - began)]}

    def _memory(self, count: int) -> dict[str, list[float]]:
        """Growth per sandbox, with four that are used once: of this process, of all below it, and of the Engine's."""
        sizes = []
        _life_ms(self._peer.cold)  # the first may start what is kept for all of them
        for _ in range(count):
            before = _pss_bytes(_own())
            with ExitStack() as stack:
                sandboxes = [stack.enter_context(closing(self._peer.cold())) for _ in range(_CROWD)]
                for sandbox in sandboxes:
                    sandbox.add()
                theirs = {each for sandbox in sandboxes for each in _of_container(sandbox.container)}
                sizes.append((_pss_bytes(_own() | theirs) - before) / _CROWD / _MIB)
        return {"idle memory": sizes}

    def _one(self) -> Sandbox:
        if self._kept is None:
            self._kept = self._peer.usual()
            for _ in range(3):
                self._kept.add()
        return self._kept


def _life_ms(make: Callable[[], Sandbox]) -> float:
    """Milliseconds until a sandbox is made and used once; closing it is not counted."""
    began = time.perf_counter()
    sandbox = make()
    try:
        sandbox.add()
        return (time.perf_counter() - began) * 1000
    finally:
        sandbox.close()


def _lines_ms(sandbox: Sandbox) -> tuple[float, float]:
    """Milliseconds until the first line was there, and until the end."""
    began = time.perf_counter()
    seen: list[float] = []
    sandbox.lines(lambda: seen.append(time.perf_counter()))
    ended = time.perf_counter()
    return (seen[0] - began) * 1000, (ended - began) * 1000


def _ms(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def _own() -> set[psutil.Process]:
    this = psutil.Process()
    return {this, *this.children(recursive=True)}


def _of_container(name: str) -> set[psutil.Process]:
    """Returns all processes in a container, the Engine's process above them, and those that forward its ports."""
    if not name:
        return set()
    address = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{end}}"
    inspected = _docker("inspect", "--format", "{{.State.Pid}} " + address, name).split()
    first = psutil.Process(int(inspected[0]))
    forwards = {
        process
        for process in psutil.process_iter(["name", "cmdline"])
        if process.info["name"] == "docker-proxy" and set(inspected[1:]) & set(process.info["cmdline"] or ())
    }
    shim = first.parent()
    return {first, *first.children(recursive=True), *([shim] if shim else ()), *forwards}


def _docker(*arguments: str) -> str:
    return subprocess.run(
        ["docker", *arguments], check=True, capture_output=True, text=True, timeout=_DOCKER_TIMEOUT_S
    ).stdout


def _pss_bytes(processes: Iterable[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:  # it has ended meanwhile
            continue
    return total
