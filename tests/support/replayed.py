"""Examples run by a daemon that records their sessions, and then run again from the recordings.

python -m tests.support.replayed NAME [ARGUMENTS]   runs an example as a script, and prints how its sessions ran again
"""

from __future__ import annotations

import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from executor_client import ExecutorClient, Recording
from executor_client.replays.again import Replayed, execute_again

EXAMPLES = Path(__file__).parents[2] / "examples"
POLICY = """
default = "default"
[profiles.default.record]
mode = "full"
"""


def replays(client: ExecutorClient, seen: set[str], ignore: Sequence[str] = ()) -> list[Replayed]:
    """Ends the sessions that are not in `seen`, and runs them again in the order in which they began."""
    for session_id in {each.session_id for each in client.list_sessions()} - seen:
        client.get_session(session_id).close()
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for recorded in [each.session_id for each in client.list_recordings() if each.session_id not in seen]:
            client.get_recording(recorded, Path(directory, recorded))
            with Recording(Path(directory, recorded)) as recording:
                found.append(execute_again(client, recording, ignore=ignore))
    return found


def check_replays(
    client: ExecutorClient, seen: set[str], *, lacks: Sequence[str] = (), ignore: Sequence[str] = ()
) -> None:
    """Asserts that all new sessions run again as recorded.

    What begins with one of `lacks` may be unverified. The output of commands whose text has one of `ignore` is not compared.
    """
    found = replays(client, seen, ignore)
    assert found and all(each.steps or each.commands for each in found), found
    for each in found:
        assert each.divergence is None, "\n".join(each.divergence.lines())
        assert all(lack.startswith(tuple(lacks)) for lack in each.unverified), each.unverified


def seen_in(client: ExecutorClient) -> set[str]:
    return {each.session_id for each in client.list_recordings()}


@contextmanager
def _recording_daemon(backend: str, *, configuration: str = "", policy: str = "") -> Iterator[str]:
    profile = policy.partition('default = "')[2].partition('"')[0] or "default"
    policy = policy or 'default = "default"'
    policy += f'\n[profiles.{profile}.record]\nmode = "full"\n'
    with _own_daemon(backend, configuration=configuration, policy=policy) as address:
        yield address
        with ExecutorClient(address) as client:
            for each in replays(client, set()):
                how = "diverged" if each.divergence else "as recorded"
                ran = f"{each.steps} steps, {each.commands} commands"
                sys.stdout.write(f"REPLAYED {ran}: {how}; lacks {list(each.unverified)}\n")
                sys.stdout.writelines(f"{line}\n" for line in (each.divergence.lines() if each.divergence else ()))


if __name__ == "__main__":
    name, *arguments = sys.argv[1:]
    sys.path.insert(0, str(EXAMPLES))
    module: Any = __import__("own_daemon")
    _own_daemon = module.own_daemon
    module.own_daemon = _recording_daemon
    sys.argv = [name, *arguments]
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
