"""A daemon that is killed: makes sandboxes or a session in a process of its own, says what, and dies by SIGKILL.

    python -m tests.support.killed_daemon {"backend": …, "state_dir": …, "e2b": …, "spec": …} sandbox | session

What it says is JSON, one line: of a sandbox its id, token and fingerprint; of a session its id.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from executor_server.core.config.backend_config import E2BSection
from executor_server.core.model import SandboxSpec
from executor_server.core.packages import PackagesSpec
from tests.support.backends import make_backend
from tests.support.fork_server import KILLED_DAEMON, run

DEADLINE_S = 60.0
# Runs in its session, and says so before the daemon dies; it goes on until the file `go` is there.
PROGRAM = """
print('before', flush=True)
import os, time
while not os.path.exists('go'):
    time.sleep(0.01)
print('after', flush=True)
new = 'not in the savepoint'
kept
"""


@dataclass(frozen=True)
class Left:
    """The last output of a killed daemon."""

    said: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.said[name]


async def killed_daemon(backend: str, state_dir: Path, what: str, spec: SandboxSpec, e2b: E2BSection | None) -> Left:
    """Runs one to its death, in a process of its own."""
    section = e2b.model_dump(mode="json", exclude_unset=True) if e2b is not None else None
    order = {"backend": backend, "state_dir": str(state_dir), "e2b": section, "spec": asdict(spec)}
    done = await asyncio.to_thread(run, [*KILLED_DAEMON, json.dumps(order), what], timeout=DEADLINE_S)
    assert done.returncode == -signal.SIGKILL, f"it ended by itself, with status {done.returncode}: {done.stderr}"
    return Left(json.loads(done.stdout.splitlines()[-1]))  # before it come lines of the log


async def _sandbox(order: dict[str, Any]) -> dict[str, Any]:
    backend = _backend(order)
    await backend.start()
    await backend.adopt(())
    spec, asked = SandboxSpec(**order["spec"]), order["spec"]["packages"]
    if asked is not None:
        spec = replace(spec, packages=PackagesSpec(**{**asked, "requirements": tuple(asked["requirements"])}))
    made = await backend.create(spec)
    return {"sandbox_id": made.sandbox_id, "token": made.endpoint.token.hex(), "fingerprint": made.fingerprint}


async def _session(order: dict[str, Any]) -> dict[str, Any]:
    from tests.contract.harness import Harness

    harness = await Harness(_backend(order), Path(order["state_dir"])).__aenter__()
    session = await harness.session(egress=order["spec"]["egress"])
    if order["spec"]["egress"]:
        # Served by this daemon until its end.
        order["listener"] = await session._connection.take_listener()
    await harness.run(session, "kept = 'kept'")
    await session.savepoints.take()
    execution = await harness.begin(session, PROGRAM)
    await anext(execution.events())
    return {"session_id": session.session_id, "execution_id": execution.execution_id}


def _backend(order: dict[str, Any]) -> Any:
    e2b = E2BSection.model_validate(order["e2b"]) if order["e2b"] is not None else None
    return make_backend(order["backend"], Path(order["state_dir"]), e2b=e2b)


def main() -> None:
    order, what = json.loads(sys.argv[1]), {"sandbox": _sandbox, "session": _session}[sys.argv[2]]

    async def live_and_die() -> None:
        sys.stdout.write(json.dumps(await what(order)) + "\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(live_and_die())


if __name__ == "__main__":
    main()
