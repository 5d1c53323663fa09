"""A real daemon as a node of a fleet, without a front: tests bring their own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor_server.fleet.membership import issue_front, issue_node
from tests.support.fork_server import SERVER, popen
from tests.support.free_ports import free_port
from tests.support.polling import eventually

NODE = "n1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0


@dataclass
class NodeDaemon:
    """The node's process, which tests may kill, stop and start again."""

    directory: Path
    link_address: str
    name: str
    process: subprocess.Popen[bytes]
    starts: int = 1

    @property
    def state_dir(self) -> Path:
        return self.directory / "s"

    @property
    def front_folder(self) -> Path:
        return self.directory / "fleet" / "front"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def start_again(self) -> None:
        assert self.process.poll() is not None
        self.process = _started(self.directory)
        self.starts += 1
        _wait_until_served(self)

    def stop(self) -> int:
        """Asks it to stop; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)


@contextmanager
def node_daemon(
    config: str = "", *, fleet: str = "", name: str = NODE, certificates: Path | None = None
) -> Iterator[NodeDaemon]:
    """Starts a node with these lines in its configuration, and in its section [fleet].

    Without the directory of a fleet's `certificates` it has a fleet of its own.
    """
    directory = Path(tempfile.mkdtemp(prefix="n-"))
    if certificates is None:
        certificates = directory / "fleet"
        issue_front(certificates)
    folder = issue_node(certificates, name).folder
    link_address = f"127.0.0.1:{free_port()}"
    (directory / "config.toml").write_text(
        f'{config}\n[fleet]\nrole = "node"\ncertificates = "{folder}"\nlisten = "{link_address}"\n{fleet}\n'
    )
    node = NodeDaemon(directory, link_address, name, _started(directory))
    try:
        _wait_until_served(node)
        yield node
    finally:
        if node.process.poll() is not None and node.process.returncode != 0:
            node.start_again()  # it ends what the killed one has left
        code = node.stop()
        assert code == 0, node.log[-8000:]
        shutil.rmtree(directory)


def _started(directory: Path) -> subprocess.Popen[bytes]:
    command = [*SERVER, "serve", "--config", str(directory / "config.toml")]
    environment = {**os.environ, "EXECUTOR_STATE_DIR": str(directory / "s")}
    with (directory / "log").open("ab") as output:
        return popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _wait_until_served(node: NodeDaemon) -> None:
    """Waits for the line of a daemon that serves. Its listener is open before, and then calls wait or fail."""

    def serves() -> bool:
        assert node.process.poll() is None, node.log
        return node.log.count("executor-server listens on ") == node.starts

    assert eventually(serves, timeout_s=START_TIMEOUT_S), node.log
