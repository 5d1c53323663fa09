"""A real console as a process of its own, next to a daemon."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.support.daemon import Daemon
from tests.support.fork_server import SERVER, popen
from tests.support.free_ports import free_port

STOP_TIMEOUT_S = 30.0
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Console:
    """A console that runs."""

    process: subprocess.Popen[str]
    url: str
    first_link: str
    daemon: Daemon
    log: Path
    state_dir: Path

    def link(self) -> str:
        """A one-time link that works."""
        return (self.state_dir / "console/link").read_text().strip()

    @contextmanager
    def browser(self) -> Iterator[Browser]:
        """A signed-in client."""
        with httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False) as http:
            assert http.get(self.link()).status_code == 200
            yield Browser(http)

    def stop(self) -> None:
        """Asks it to stop, and it must."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_TIMEOUT_S) == 0, self.log.read_text()[-8000:]


@dataclass(frozen=True)
class Browser:
    """A browser without JavaScript that has signed in."""

    http: httpx.Client

    def get(self, path: str) -> str:
        """The page; it must be there."""
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def post(self, path: str, **fields: str) -> httpx.Response:
        """Sends a form with the token of a page."""
        return self.http.post(path, data={"csrf": self.csrf(), **fields})

    def csrf(self) -> str:
        found = re.search('name="csrf" value="([^"]+)"', self.get("/"))
        assert found is not None
        return found[1]

    @contextmanager
    def events(self, path: str) -> Iterator[Iterator[tuple[str, str]]]:
        """The changes (name, HTML) of a stream, as they come."""
        with self.http.stream("GET", path) as answer:
            assert answer.status_code == 200, answer.read()
            yield _changes(answer)


def _changes(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    name, lines = "", list[str]()
    for line in answer.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            lines.append(value)
        elif not line and name:
            yield name, "\n".join(lines)
            name, lines = "", []


@contextmanager
def running_console(daemon: Daemon, *options: str, state_dir: Path | None = None) -> Iterator[Console]:
    """A console of this daemon at a free port; `state_dir` replaces the daemon's. At the end it must stop; it may have been killed."""
    state_dir = state_dir or daemon.state_dir
    log = daemon.state_dir.parent / "console-log"
    command = [
        *SERVER,
        "console",
        "--listen",
        f"127.0.0.1:{free_port()}",
        "--state-dir",
        str(state_dir),
        *options,
    ]
    with (
        log.open("ab") as errors,
        popen(command, env=dict(os.environ), text=True, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"open ((http://\S+?)/\S+)", line)
        assert found is not None, line + log.read_text()
        console = Console(process, found[2], found[1], daemon, log, state_dir)
        try:
            yield console
        finally:
            if process.poll() is None:
                console.stop()
