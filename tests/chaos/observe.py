"""Views of a daemon and its sandboxes from outside, and attacks on them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from executor_client import ExecutionResult, LogEvent, Session
from tests.support.daemon import Daemon

WAIT_S = 60.0


class Host(Protocol):
    """A daemon that has sandboxes; a node of a fleet is one."""

    @property
    def state_dir(self) -> Path: ...


@dataclass(frozen=True)
class Sandbox:
    """The processes of one sandbox: bubblewrap's monitor, the supervisor, and what the supervisor started."""

    monitor: psutil.Process | None  # None: a template process forked it
    supervisor: psutil.Process

    @property
    def child_processes(self) -> list[psutil.Process]:
        """The interpreter and the checker."""
        return list(self.supervisor.children())

    def process(self, pid_inside: int) -> psutil.Process:
        """The one that is known inside by this number."""
        (found,) = (child for child in self.child_processes if _pid_inside(child) == pid_inside)
        return found

    def is_gone(self) -> bool:
        return not any(_is_alive(process) for process in (self.monitor, self.supervisor) if process is not None)


def sandboxes(daemon: Host) -> list[Sandbox]:
    """All sandboxes that have their record, oldest first; those of the pool too."""
    found = []
    for record in (daemon.state_dir / "sandboxes").glob("*/record.json"):
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess, ValueError):  # it ended, or is being made
            recorded = json.loads(record.read_text())
            supervisor = psutil.Process(recorded["pid"])
            monitor = psutil.Process(supervisor.ppid()) if "monitor_pid" in recorded else None
            found.append((supervisor.create_time(), Sandbox(monitor, supervisor)))
    return [sandbox for _, sandbox in sorted(found, key=lambda each: each[0])]


def only_sandbox(daemon: Host) -> Sandbox:
    (sandbox,) = sandboxes(daemon)
    return sandbox


def sandbox_directories(daemon: Host) -> set[str]:
    return {entry.name for entry in (daemon.state_dir / "sandboxes").iterdir() if entry.is_dir()}


def works(daemon: Daemon) -> bool:
    with daemon.client() as client, client.create_session() as session:
        return bool(session.execute("6 * 7").output == 42)


def open_files(daemon: Daemon) -> int:
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))  # noqa: PTH208 - as a number only


def memory_bytes(daemon: Daemon) -> int:
    resident: int = psutil.Process(daemon.process.pid).memory_info().rss
    return resident


def _pid_inside(process: psutil.Process) -> int:
    (line,) = (each for each in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "NSpid" in each)
    return int(line.split()[-1])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def executing(session: Session, code: str, **options: object) -> Iterator[Future[ExecutionResult]]:
    """Runs code in a thread and goes on when it has printed; at the end the execution must have ended."""
    printed = threading.Event()

    def on_event(event: object) -> None:
        if isinstance(event, LogEvent):
            printed.set()

    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(lambda: session.execute(code, on_event=on_event, **options))  # type: ignore[arg-type]
        result.add_done_callback(lambda _: printed.set())
        assert printed.wait(WAIT_S)
        yield result
