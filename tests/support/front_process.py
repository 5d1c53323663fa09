"""A front as a process, which tests may kill and start again, over nodes that are processes too."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor_client import ExecutorClient
from executor_server.fleet.membership import issue_front
from tests.support.fork_server import SERVER, popen, server
from tests.support.node_daemon import NodeDaemon, node_daemon
from tests.support.polling import eventually

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


@dataclass
class FrontProcess:
    """The front's process. `nodes` are those that it has, by their names."""

    directory: Path
    nodes: dict[str, NodeDaemon] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.directory / 's' / 'executor.sock'}"

    @property
    def token(self) -> str:
        return (self.directory / "s" / "token").read_text().strip()

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def client(self, **options: Any) -> ExecutorClient:
        return ExecutorClient(self.address, token=self.token, **options)

    def command(self, *arguments: str) -> str:
        """Runs a command of `executor-server` against this front. Returns what it prints."""
        access = ["--address", self.address, "--state-dir", str(self.directory / "s")]
        done = server(*arguments, *access, COLUMNS="80")
        assert done.returncode == 0, done.stderr
        return done.stdout

    def states(self) -> dict[str, str]:
        """Returns the states of the nodes; empty while the front does not answer."""
        from executor_server.api import AdminEndpoint, AdminError, admin_client

        try:
            with admin_client(AdminEndpoint(self.address, self.token)) as client:
                nodes = client.fleet()["nodes"]
        except (AdminError, FileNotFoundError):
            return {}
        return {each["node"]: each["state"].removeprefix("NODE_STATE_").lower() for each in nodes}

    def start(self) -> None:
        command = [*SERVER, "front", "--config", str(self.directory / "config.toml")]
        with (self.directory / "log").open("ab") as output:
            self.process = popen(command, stdout=output, stderr=subprocess.STDOUT)

    def wait_until_serving(self) -> None:
        wanted = dict.fromkeys(self.nodes, "serving")
        assert eventually(lambda: self.states() == wanted, timeout_s=START_TIMEOUT_S), self.log[-8000:]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        assert self.process.wait(STOP_TIMEOUT_S) == 0, self.log[-8000:]


@contextmanager
def front_over(names: Sequence[str], *, fleet: str = "", policy: str = "", node: str = "") -> Iterator[FrontProcess]:
    """Runs a front over nodes of these names; `fleet` are lines of its [fleet], `node` of the nodes' configuration."""
    directory = Path(tempfile.mkdtemp(prefix="f-"))
    folder = issue_front(directory / "fleet").folder
    front = FrontProcess(directory)
    with ExitStack() as stack:
        for name in names:
            front.nodes[name] = stack.enter_context(node_daemon(node, name=name, certificates=directory / "fleet"))
        addresses = ", ".join(f'"{each.link_address}"' for each in front.nodes.values())
        (directory / "policy.toml").write_text(policy)
        lines = f'[policy]\nfile = "{directory / "policy.toml"}"\n' if policy else ""
        (directory / "config.toml").write_text(
            f'[server]\nstate_dir = "{directory / "s"}"\nlisten = ["unix:{directory / "s" / "executor.sock"}"]\n{lines}'
            f'[fleet]\nrole = "front"\ncertificates = "{folder}"\nnodes = [{addresses}]\n{fleet}\n'
        )
        front.start()
        try:
            front.wait_until_serving()
            yield front
        finally:
            front.stop()
    shutil.rmtree(directory)
