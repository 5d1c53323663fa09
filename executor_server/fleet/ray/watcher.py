"""Starts a daemon again when it dies, as systemd does with Restart=always; for both kinds of actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from executor_server.core.config import ConfigError
from executor_server.fleet.membership import CertificateError
from executor_server.fleet.ray.daemon import DaemonError, OwnDaemon

WATCH_S = 0.3
"""Seconds between two checks of the daemon, so that it is back within the lease of its sessions."""
MAX_RESTART_WAIT_S = 30.0
"""The longest wait before a daemon that ends at once is started again; the first is `WATCH_S`, each one doubles it."""
GOOD_AFTER_S = 60.0
"""Seconds that a daemon must run for the next wait to be the shortest again."""


@dataclass
class RestartDelay:
    """Decides when a daemon that has died may be started again. Takes the time as an argument."""

    delay_s: float = WATCH_S
    started_s: float = 0.0
    next_s: float = 0.0

    def is_due(self, now_s: float) -> bool:
        return now_s >= self.next_s

    def started(self, now_s: float) -> None:
        self.started_s, self.next_s = now_s, now_s + self.delay_s
        self.delay_s = min(2 * self.delay_s, MAX_RESTART_WAIT_S)

    def runs(self, now_s: float) -> None:
        if now_s - self.started_s >= GOOD_AFTER_S:
            self.delay_s, self.next_s = WATCH_S, now_s


class DaemonWatcher:
    """Keeps one daemon running from `start` until `stop`, and adopts one that runs already.

    `prepare` writes its files before each start, and is not called for one that is adopted. A problem is kept in
    `problem`, and the start is tried again.
    """

    def __init__(self, daemon: OwnDaemon, command: Sequence[str], prepare: Callable[[], None]) -> None:
        self.problem = ""
        self.adopted = False
        self.restarts = 0
        self._daemon = daemon
        self._command = tuple(command)
        self._prepare = prepare
        self._delay = RestartDelay()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts or adopts the daemon, and starts the thread that watches it. Idempotent."""
        with self._lock:
            if self._thread is not None or self._closed.is_set():
                return
            self._thread = threading.Thread(target=self._watch, name="daemon-watcher", daemon=True)
            self._attempt()
            self._thread.start()

    def stop(self) -> bool:
        """Ends the daemon in order, for good; False when it had to be killed. Idempotent."""
        self._closed.set()
        with self._lock:
            return self._daemon.stop()

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_S):
            now_s = time.monotonic()
            if self._daemon.identity() is not None:
                self._delay.runs(now_s)
            elif self._delay.is_due(now_s):
                with self._lock:
                    if not self._closed.is_set():
                        self.restarts += 1
                        self._attempt()

    def _attempt(self) -> None:
        self._delay.started(time.monotonic())
        try:
            if self._daemon.identity() is None:
                self._prepare()
            self.adopted = self._daemon.start(self._command).adopted
            self.problem = ""
        except (ConfigError, CertificateError, DaemonError, OSError) as error:
            self.problem = str(error)
