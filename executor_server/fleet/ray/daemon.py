"""A daemon of this machine: a folder with its configuration, state directory, pid file and log.

It runs at most once: a second start adopts the running one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.fleet.ray.processes import ProcessIdentity, held, read_pid_file

START_TIME_S = 60.0
"""Seconds for the process to exist; a loaded machine takes seconds to start a Python."""
STOP_TIME_S = 40.0
"""Seconds for a daemon to end after the second request to stop; then it is killed."""
HURRY_AFTER_S = 5.0
"""Seconds until the second request, after which it does not wait for executions any more."""
LOG_TAIL_BYTES = 4000


class FleetError(Exception):
    """A fleet on Ray can't be made, shown or ended; the message says why, in a sentence."""


class DaemonError(FleetError):
    """A daemon could not be started."""


class EndedAtOnce(DaemonError):
    """A daemon was started and has ended by now; `pid` was its own, and is the number of its session (setsid)."""

    def __init__(self, message: str, pid: int) -> None:
        super().__init__(message)
        self.pid = pid


@dataclass(frozen=True)
class Started:
    identity: ProcessIdentity
    adopted: bool


@dataclass(frozen=True)
class OwnDaemon:
    """`name` is that of its files in `folder`."""

    folder: Path
    name: str

    @property
    def pid_file(self) -> Path:
        return self.folder / f"{self.name}.pid"

    @property
    def log_file(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def config_file(self) -> Path:
        return self.folder / f"{self.name}.toml"

    @property
    def state_dir(self) -> Path:
        return self.folder / "state"

    def identity(self) -> ProcessIdentity | None:
        """Returns the daemon's process; None when it does not run."""
        return read_pid_file(self.pid_file)

    def start(self, command: Sequence[str]) -> Started:
        """Starts the command, or adopts the process that runs already. Raises DaemonError, EndedAtOnce."""
        helper = [sys.executable, "-m", "executor_server.fleet.ray.detach", str(self.pid_file), str(self.log_file)]
        try:
            answer = subprocess.run(
                [*helper, *command], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_TIME_S
            )
        except subprocess.TimeoutExpired as error:
            raise DaemonError(f"The process of {self.folder} was not started within {START_TIME_S:g} s.") from error
        if answer.returncode != 0:
            text = answer.stderr[-LOG_TAIL_BYTES:]
            raise DaemonError(f"The process of {self.folder} could not be started:\n{text}")
        done, _, pid = answer.stdout.partition(" ")
        identity = self.identity()
        if identity is None:
            message = f"The process of {self.folder} has ended at its start:\n{self.log_tail()}"
            raise EndedAtOnce(message, int(pid))
        return Started(identity, adopted=done == "adopted")

    def stop(self, time_s: float = STOP_TIME_S) -> bool:
        """Asks the daemon to stop, twice, and kills it after `time_s`. False when it had to be killed. Idempotent."""
        if not self.folder.is_dir():  # it was never prepared
            return True
        with held(self.pid_file):
            identity = self.identity()
            ended = identity is None or _stopped(identity, time_s)
            self.pid_file.unlink(missing_ok=True)
        return ended

    def log_tail(self) -> str:
        """Returns the end of the log, for people."""
        try:
            with self.log_file.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""


def _stopped(identity: ProcessIdentity, time_s: float) -> bool:
    for wait_s in (min(HURRY_AFTER_S, time_s), time_s):
        identity.send(signal.SIGTERM)
        if identity.wait(wait_s):
            return True
    identity.send(signal.SIGKILL)
    identity.wait(time_s)
    return False
