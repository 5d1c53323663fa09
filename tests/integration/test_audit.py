"""The audit log of a real daemon: every execution is recorded before a client sees any event of it."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClient, ExecutorClientError
from executor_server.policy.audit.verification import verify
from tests.support.audit import paths, records
from tests.support.backends import require
from tests.support.daemon import STOP_TIMEOUT_S, Daemon, running_daemon
from tests.support.rounds import rounds

SESSIONS = 8
EXECUTIONS = rounds(100, 25)


class Follower:
    """Reads a log as it grows, and collects the executions that were requested so far."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read: Counter[Path] = Counter()
        self._requested: set[str] = set()
        self._lock = threading.Lock()

    def knows(self, execution_id: str) -> bool:
        with self._lock:
            for path in paths(self._directory):
                with path.open("rb") as file:
                    file.seek(self._read[path])
                    new = file.read()
                new = new[: new.rfind(b"\n") + 1]
                self._read[path] += len(new)
                for record in map(json.loads, new.splitlines()):
                    if record["kind"] == "execution_requested":
                        self._requested.add(record["execution"])
            return execution_id in self._requested


def audit_dir(daemon: Daemon) -> Path:
    return daemon.state_dir / "audit"


def of(daemon: Daemon, session_id: str) -> list[dict[str, Any]]:
    return [record for record in records(audit_dir(daemon)) if record.get("session") == session_id]


def test_each_execution_is_requested_once_ended_once_and_requested_before_it_is_seen(
    daemon: Daemon, client: ExecutorClient
) -> None:
    follower = Follower(audit_dir(daemon))
    unknown: list[str] = []

    def run(number: int) -> str:
        with client.create_session() as session:
            for turn in range(EXECUTIONS):
                execution_id = f"{number}-{turn}"

                def on_event(_event: object, name: str = execution_id) -> None:
                    if not follower.knows(name):
                        unknown.append(name)

                assert session.execute(f"{turn}", execution_id=execution_id, on_event=on_event).output == turn
            return session.session_id

    with ThreadPoolExecutor(SESSIONS) as threads:
        sessions = list(threads.map(run, range(SESSIONS)))
    assert unknown == []
    for number, session_id in enumerate(sessions):
        found = of(daemon, session_id)
        for kind in ("execution_requested", "execution_ended"):
            names = [record["execution"] for record in found if record["kind"] == kind]
            assert names == [f"{number}-{turn}" for turn in range(EXECUTIONS)]
    assert verify(audit_dir(daemon)).whole


def test_a_session_can_be_followed_from_its_request_to_its_end(daemon: Daemon, client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["math"]) as session:
        session.register_tools({"ask": lambda size: "x" * size})
        session.set_variables({"n": 1})
        session.put_file("a.txt", b"12345")
        session.execute("import math\nask(7)", execution_id="e1")
        session.get_variables(["n"])
        session.get_file("a.txt")
        session.execute("1 / 0", execution_id="e2")
    found = of(daemon, session.session_id)
    created = found[0]
    requested = next(each for each in records(audit_dir(daemon)) if each.get("request") == created["request"])
    assert requested["kind"] == "session_requested"
    assert "math" in requested["imports"]
    assert [record["kind"] for record in found] == [
        "session_created",
        "tools_registered",
        "variables_set",
        "file_put",
        "execution_requested",
        "tool_called",
        "tool_answered",
        "execution_ended",
        "variables_read",
        "file_requested",
        "file_got",
        "execution_requested",
        "execution_ended",
        "session_ended",
    ]
    by_kind = {record["kind"]: record for record in reversed(found)}
    assert (by_kind["file_put"]["bytes"], by_kind["file_got"]["bytes"]) == (5, 5)
    assert by_kind["tool_called"]["tool"] == "ask"
    assert (by_kind["execution_ended"]["outcome"], by_kind["execution_ended"]["imports"]) == ("succeeded", ["math"])
    assert found[-2]["error"] == "ZeroDivisionError"
    assert len({record["policy"] for record in found}) == 1


def test_what_is_refused_is_written_with_the_rule_that_refuses_it(daemon: Daemon, client: ExecutorClient) -> None:
    with pytest.raises(ExecutorClientError):
        client.create_session(limits={"memory_bytes": 10**15})
    refused = [record for record in records(audit_dir(daemon)) if record["kind"] == "request_refused"][-1]
    assert refused["reason"] == "POLICY_VIOLATION"
    assert refused["violations"][0]["rule"].endswith("limits.max.memory_bytes")


def test_a_wrong_token_is_written_without_the_token(daemon: Daemon) -> None:
    token = "hush" * 16
    with ExecutorClient(daemon.address, token=token) as stranger, pytest.raises(ExecutorClientError):
        stranger.get_policy()
    text = b"".join(path.read_bytes() for path in paths(audit_dir(daemon)))
    assert b"credentials_refused" in text
    assert b"hush" not in text


def test_values_code_and_contents_are_not_in_the_log(daemon: Daemon, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.set_variables({"purpose": "hushvalue"})
        session.put_file("a.txt", b"hushfile")
        session.execute("print('hushtext'); hushcode = 1; raise ValueError('husherror')")
    text = b"".join(path.read_bytes() for path in paths(audit_dir(daemon)))
    assert b"hush" not in text


# -- a daemon of its own

POLICY = """
version = "7"
default = "p"
[profiles.p.audit]
code = "full"
"""


@pytest.fixture
def own_daemon() -> Iterator[Daemon]:
    """A daemon that waits for the disk and records all of the code."""
    require("local")
    with tempfile.TemporaryDirectory(prefix="d-") as made:
        policy, config = Path(made, "policy.toml"), Path(made, "config.toml")
        policy.write_text(POLICY)
        config.write_text(f'[policy]\nfile = "{policy}"\n[pool]\nsize = 0\n[audit]\nsync = "always"\n')
        with running_daemon(Path(made), "--config", str(config)) as running:
            yield running


def test_a_daemon_says_when_it_starts_and_stops_and_with_which_policy(own_daemon: Daemon) -> None:
    own_daemon.process.terminate()
    assert own_daemon.process.wait(STOP_TIMEOUT_S) == 0
    first, *_, last = records(audit_dir(own_daemon))
    assert (first["kind"], first["policy_version"], last["kind"]) == ("daemon_started", "7", "daemon_stopped")


def test_all_of_the_code_is_written_where_the_profile_wants_it(own_daemon: Daemon) -> None:
    code = "x = 'é\\n'\nx"
    with own_daemon.client() as client, client.create_session() as session:
        assert session.execute(code).output == "é\n"
    (requested,) = (each for each in records(audit_dir(own_daemon)) if each["kind"] == "execution_requested")
    assert requested["code"] == code
    assert verify(audit_dir(own_daemon)).whole


def test_input_signals_watches_and_new_names_are_recorded_as_code_and_files_are(own_daemon: Daemon) -> None:
    """A program that is typed into `python3 -` is as much code as one that is executed."""
    typed = b"print('typed', 6 * 7)\n"
    with own_daemon.client() as client, client.create_session(name="before") as session:
        with session.processes.start(["python3", "-"], stdin=True) as process:
            process.write(typed)
            process.write(b"\xff")
            process.close_stdin()
            process.wait()
        with session.processes.start(["sleep", "100"]) as sleeping:
            sleeping.signal(15)
            sleeping.wait()
        with session.files.watch("", recursive=False):
            pass
        session.rename("after")
    found = of(own_daemon, session.session_id)
    first, second = (record for record in found if record["kind"] == "input_put")
    assert first["process"] == second["process"] == process.process_id
    assert (first["input"], first["bytes"], first["input_sha256"]) == (
        typed.decode(),
        len(typed),
        hashlib.sha256(typed).hexdigest(),
    )
    assert (second["input"], second["offset"]) == ("\\xff", len(typed))
    (signalled,) = (record for record in found if record["kind"] == "signal_requested")
    assert (signalled["process"], signalled["signal"]) == (sleeping.process_id, 15)
    (watched,) = (record for record in found if record["kind"] == "watch_requested")
    assert (watched["path"], watched["recursive"]) == ("", False)
    (renamed,) = (record for record in found if record["kind"] == "rename_requested")
    assert (renamed["before"], renamed["name"]) == ("before", "after")
    assert verify(audit_dir(own_daemon)).whole
