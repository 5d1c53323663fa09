"""A real gateway as a process of its own, next to a daemon."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from executor_client import ExecutorClient
from executor_server.core.config import StateDir
from executor_server.policy.identity import TokenFile
from tests.support.daemon import Daemon, is_known
from tests.support.fork_server import SERVER, popen
from tests.support.free_ports import free_port
from tests.support.polling import eventually

STOP_TIMEOUT_S = 30.0
CONFIG = """
[gateway.templates]
"code-interpreter-v1" = "base"
"""
"""Templates that clients name if they are not told another."""


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs. `token` and `other_token` are of two tenants, in the form of E2B's keys."""

    process: subprocess.Popen[str]
    url: str
    daemon: Daemon
    token: str
    other_token: str
    log: Path

    def environment(self, token: str | None = None) -> Mapping[str, str]:
        """The variables with which E2B's SDK uses this gateway."""
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": token or self.token}

    def stop(self) -> None:
        """Asks it to stop, and it must."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(STOP_TIMEOUT_S) == 0, self.log.read_text()[-8000:]


def e2b_token(daemon: Daemon, tenant: str) -> str:
    """A token in the form of E2B's keys, once the daemon knows it."""
    _, token = TokenFile(StateDir(daemon.state_dir).tokens_path).new(tenant, "default", form="e2b")
    with ExecutorClient(daemon.address, token=token) as client:
        assert eventually(lambda: is_known(client))
    return token


@contextmanager
def running_gateway(daemon: Daemon, *options: str, config: str = CONFIG) -> Iterator[Gateway]:
    """A gateway of this daemon at a free port. At the end it must stop; it may have been killed."""
    token, other_token = (e2b_token(daemon, tenant) for tenant in ("one", "other"))
    log = daemon.state_dir.parent / "gateway-log"
    file = log.with_name("gateway.toml")
    file.write_text(config)
    places = ["--config", str(file), "--state-dir", str(daemon.state_dir)]
    command = [*SERVER, "gateway", "--listen", f"127.0.0.1:{free_port()}", *places, *options]
    with (
        log.open("ab") as errors,
        popen(command, env=dict(os.environ), text=True, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("executor-server gateway listens on "), line + log.read_text()
        gateway = Gateway(process, line.split()[-1], daemon, token, other_token, log)
        try:
            yield gateway
        finally:
            if process.poll() is None:
                gateway.stop()
