"""A daemon's part as a node: its files, the front's policy, the end of its sessions, and its configuration."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_server.core.config import Config, ConfigError, StateDir, StateDirError, load
from executor_server.core.lifecycle import SessionEnd
from executor_server.fleet.daemons import fencing
from executor_server.fleet.daemons.fencing import Fencing
from executor_server.fleet.daemons.node import Node, NodeIds
from executor_server.fleet.daemons.node_control import MAX_PROBLEM_CHARS, NodeControl
from executor_server.fleet.daemons.node_files import BUILT_IN_POLICY, NodeFiles
from executor_server.fleet.membership import (
    Control,
    FrontHello,
    Heartbeat,
    NodeRefused,
    Timing,
    fingerprint_of,
    issue_front,
    issue_node,
)
from executor_server.policy import PolicyStore, policy_for
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile
from executor_server.sessions import StateArchives
from tests.support.clock import Clock
from tests.support.fake_front import hello_of
from tests.support.polling import eventually_async

POLICY = b'version = "2"\ndefault = "d"\n[profiles.d]\n'
KEY = b"k" * 43


# -- files


@pytest.fixture
def files(tmp_path: Path) -> NodeFiles:
    return NodeFiles(StateDir(tmp_path))


def test_a_new_node_has_a_record_of_its_own_and_the_built_in_policy(files: NodeFiles) -> None:
    record = files.read_record()
    assert (record.epoch, record.front_id) == (1, "") and len(record.instance) == 32
    assert files.policy.read_bytes() == BUILT_IN_POLICY


def test_a_record_comes_back_as_it_was_written(files: NodeFiles, tmp_path: Path) -> None:
    heartbeat = Heartbeat(files.read_record(), files.write_record, Timing(), 0.0)
    assert heartbeat.hello(hello_of(lease_s=3.0), 1.0)
    assert NodeFiles(StateDir(tmp_path)).read_record() == heartbeat.record
    assert stat.S_IMODE((tmp_path / "node" / "record.json").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"instance": ""}',
        b'{"instance": "a", "epoch": 0}',
        b'{"instance": "a", "epoch": true}',
        b'{"instance": "a", "epoch": "1"}',
        b'{"instance": "a", "terms": {"f": -1}}',
        b'{"instance": "a", "terms": []}',
        b'{"instance": "a", "unknown": 1}',
        b"[" * 60_000,
    ],
)
def test_a_damaged_record_stops_the_start(files: NodeFiles, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "node" / "record.json").write_bytes(content)
    with pytest.raises(StateDirError, match="is damaged"):
        files.read_record()


# -- the policy of the front


@dataclass
class Controlled:
    control: NodeControl
    policies: PolicyStore
    archives: StateArchives
    files: NodeFiles


@pytest.fixture
def controlled(files: NodeFiles, tmp_path: Path) -> Controlled:
    def made(file: PolicyFile) -> Policy:
        if file.version == "unservable":
            raise ConfigError(["profiles.d.image: no such image"])
        return policy_for(file, Config())

    policies = PolicyStore(files.policy, made, 60.0, copies=files.locks)
    archives = StateArchives(tmp_path / "states", b"own")
    return Controlled(NodeControl(files, policies, archives), policies, archives, files)


def control_of(policy: bytes, key: bytes = b"") -> Control:
    return Control(policy, fingerprint_of(policy, key), key)


async def test_a_control_is_in_force_when_its_fingerprint_is_shown(controlled: Controlled) -> None:
    before = controlled.archives.key_id
    control = control_of(POLICY, KEY)
    await controlled.control.take(control)
    assert (controlled.control.fingerprint, controlled.control.problem) == (control.fingerprint, "")
    assert controlled.policies.current.version == "2"
    assert controlled.archives.key_id != before
    for path in (controlled.files.policy, controlled.files.state_key):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_an_empty_policy_is_the_built_in_one(controlled: Controlled) -> None:
    await controlled.control.take(control_of(POLICY))
    await controlled.control.take(control_of(b""))
    assert controlled.policies.current.version == "built-in"
    assert controlled.control.fingerprint == control_of(b"").fingerprint


@pytest.mark.parametrize("policy", [b"nonsense", b'version = "unservable"\ndefault = "d"\n[profiles.d]\n'])
async def test_a_policy_that_cant_be_served_leaves_the_earlier_one_in_force(
    controlled: Controlled, policy: bytes
) -> None:
    await controlled.control.take(control_of(POLICY))
    await controlled.control.take(control_of(policy))
    assert controlled.control.fingerprint == ""
    assert controlled.control.problem.startswith("policy: ")
    assert controlled.policies.current.version == "2"
    assert controlled.files.policy.read_bytes() == POLICY  # the next start reads it


LOCK_PATH = "/nowhere/agents.pylock.toml"
LOCKED = f'version = "3"\ndefault = "d"\n[profiles.d.packages]\nlock = "{LOCK_PATH}"\n'.encode()


def locked(version: str) -> bytes:
    wheel = f'{{ url = "https://e/n-{version}-py3-none-any.whl", hashes = {{ sha256 = "{"0" * 64}" }} }}'
    head = 'lock-version = "1.0"\ncreated-by = "uv"\n[[packages]]\nname = "n"\n'
    return f'{head}version = "{version}"\nwheels = [{wheel}]\n'.encode()


def with_lock(content: bytes) -> Control:
    locks = {LOCK_PATH: content}
    return Control(LOCKED, fingerprint_of(LOCKED, b"", locks), b"", locks)


async def test_the_lock_files_of_the_policy_are_the_fronts_whatever_is_at_their_paths(controlled: Controlled) -> None:
    fingerprints = set()
    for version in ("1", "2"):
        await controlled.control.take(with_lock(locked(version)))
        assert controlled.control.problem == ""
        policy = controlled.policies.current
        assert policy.locks == {LOCK_PATH: locked(version)}
        assert len(list(controlled.files.locks.iterdir())) == 1
        fingerprints.add(policy.fingerprint)
    assert len(fingerprints) == 2, "another lock is another policy"
    await controlled.control.take(control_of(POLICY))
    assert list(controlled.files.locks.iterdir()) == []


async def test_a_lock_that_cant_be_read_leaves_the_earlier_policy_and_its_lock(controlled: Controlled) -> None:
    await controlled.control.take(with_lock(locked("1")))
    await controlled.control.take(with_lock(b"nonsense"))
    assert controlled.control.problem.startswith("policy: ") and not controlled.control.fingerprint
    (path,) = controlled.files.locks.iterdir()
    assert path.read_bytes() == locked("1")


async def test_a_state_key_of_another_form_is_refused(controlled: Controlled) -> None:
    await controlled.control.take(control_of(POLICY, b"short"))
    assert controlled.control.problem.startswith("state key: ")
    assert not controlled.files.state_key.exists()


async def test_a_problem_is_fit_for_a_report(controlled: Controlled) -> None:
    await controlled.control.take(control_of(b'"\\u001b' + b"x" * 5000 + b'" = 1\n'))
    assert controlled.control.problem.isprintable()
    assert len(controlled.control.problem) <= MAX_PROBLEM_CHARS + 1


async def test_a_control_is_taken_whole_though_the_link_ends(controlled: Controlled) -> None:
    taking = asyncio.create_task(controlled.control.take(control_of(POLICY)))
    await asyncio.sleep(0)
    taking.cancel()
    assert await eventually_async(lambda: controlled.control.fingerprint)


# -- the end of its sessions


@dataclass
class Sessions:
    """A session manager's part in it."""

    ended: list[tuple[SessionEnd, float]] = field(default_factory=list)
    restarts: int = 0
    failures: int = 0

    def list_all(self) -> Sequence[object]:
        return []

    def restart_leases(self) -> None:
        self.restarts += 1

    async def end_all(self, reason: SessionEnd, retry_s: float) -> None:
        if self.failures:
            self.failures -= 1
            raise OSError("no")
        self.ended.append((reason, retry_s))


class LinkedNode:
    """A node whose time the test sets."""

    def __init__(self, files: NodeFiles, clock: Clock) -> None:
        self.clock, self.sessions = clock, Sessions()
        self.heartbeat = Heartbeat(files.read_record(), files.write_record, Timing(), clock())
        self.fencing = Fencing(self.heartbeat, cast("Any", self.sessions), 20.0)

    async def link(self, **hello: Any) -> None:
        await self.fencing.begin_link(hello_of(**{"lease_s": 3.0, "fence_s": 10.0, **hello}))

    def renew(self) -> None:
        assert self.heartbeat.renewed(self.clock())


@pytest.fixture
async def node(files: NodeFiles, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LinkedNode]:
    clock = Clock(100.0)
    monkeypatch.setattr(fencing, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(fencing, "LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr(fencing, "AFTER_FAILURE_S", 0.01)
    node = LinkedNode(files, clock)
    await node.fencing.start()
    yield node
    await node.fencing.close()


async def test_leases_of_clients_stand_while_the_front_is_silent(node: LinkedNode) -> None:
    assert await eventually_async(lambda: node.sessions.restarts)
    await node.link()
    node.renew()
    node.clock.now_s += 3.1
    before = node.sessions.restarts
    assert await eventually_async(lambda: node.sessions.restarts > before)
    assert node.sessions.ended == []


async def test_a_node_whose_front_is_silent_for_long_ends_all_and_begins_the_next_epoch(
    node: LinkedNode, files: NodeFiles
) -> None:
    await node.link()
    node.renew()
    node.clock.now_s += 13.1
    assert await eventually_async(lambda: node.heartbeat.epoch == 2)
    assert node.sessions.ended == [(SessionEnd.LEASE_LOST, 20.0)]
    assert files.read_record().epoch == 2


async def test_a_hello_that_calls_the_sessions_lost_is_answered_after_their_end(node: LinkedNode) -> None:
    await node.link()
    node.renew()
    await node.link(term=2, lost_epoch=4, instance="i2")
    assert node.sessions.ended == [(SessionEnd.LEASE_LOST, 20.0)]
    assert node.heartbeat.epoch == 5


async def test_an_end_that_fails_is_tried_again(node: LinkedNode) -> None:
    await node.link()
    node.renew()
    node.sessions.failures = 2
    node.clock.now_s += 20
    assert await eventually_async(lambda: node.heartbeat.epoch == 2)
    assert node.sessions.failures == 0


async def test_a_link_that_leaves_does_not_stop_the_end_of_the_sessions(node: LinkedNode) -> None:
    await node.link()
    node.renew()
    linking = asyncio.create_task(node.link(term=2, lost_epoch=1, instance="i2"))
    await asyncio.sleep(0)
    linking.cancel()
    assert await eventually_async(lambda: node.heartbeat.epoch == 2)


async def test_a_front_of_an_earlier_term_is_refused(node: LinkedNode) -> None:
    await node.link(term=3)
    with pytest.raises(NodeRefused):
        await node.link(term=2)


# -- ids


def test_ids_name_the_node_and_the_epoch() -> None:
    epoch = [7]
    ids = NodeIds("n-1", lambda: epoch[0])
    session_id = ids.new()
    assert session_id.startswith("n-1-00000007") and len(session_id) == len("n-1-") + 32
    assert not ids.is_foreign(session_id) and not ids.why_lost(session_id)
    epoch[0] = 8
    assert ids.is_foreign(session_id) and ids.why_lost(session_id)


@pytest.mark.parametrize("other", ["n-2-" + "0" * 32, "x", "n-1-" + "g" * 32])
def test_ids_of_others_are_foreign_and_not_lost(other: str) -> None:
    ids = NodeIds("n-1", lambda: 8)
    assert ids.is_foreign(other) and not ids.why_lost(other)


# -- configuration


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    issue_front(tmp_path / "fleet")
    return issue_node(tmp_path / "fleet", "n1").folder


def config_of(tmp_path: Path, folder: Path, **sections: dict[str, Any]) -> Config:
    fleet = {"role": "node", "certificates": str(folder), "listen": "127.0.0.1:0"}
    overrides = {**sections, "fleet": {**fleet, **sections.get("fleet", {})}}
    return load(None, {"server": {"state_dir": str(tmp_path)}, **overrides} if "server" not in sections else overrides)


def test_a_node_pings_its_sandboxes_and_lets_them_end_as_fast_as_itself(tmp_path: Path, folder: Path) -> None:
    node = Node(config_of(tmp_path, folder, fleet={"fence_s": 8.0}), StateDir(tmp_path))
    assert (node.config.sessions.orphan_time_s, node.config.sessions.ping_interval_s) == (8.0, 2.0)
    assert node.config.policy.file == tmp_path / "node" / "policy.toml"


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"policy": {"file": "/p.toml"}}, "policy.file: can't be set for a node"),
        ({"state": {"key_file": "/k"}}, "state.key_file: can't be set for a node"),
        ({"server": {"listen": ["127.0.0.1:1"]}}, "server.listen: can't be set for a node"),
        ({"server": {"token_file": "/t"}}, "server.token_file: can't be set for a node"),
        ({"sessions": {"max_sessions": 20_000}}, "sessions.max_sessions: must be at most 16,384"),
        ({"fleet": {"labels": {"a b": "c"}}}, "fleet.labels must have keys"),
        ({"fleet": {"certificates": "/nowhere"}}, "fleet.certificates: There is no certificate"),
    ],
)
def test_what_a_node_cant_have_is_refused(tmp_path: Path, folder: Path, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Node(config_of(tmp_path, folder, **sections), StateDir(tmp_path))


def test_a_stored_policy_that_the_node_cant_serve_any_more_does_not_stop_its_start(
    tmp_path: Path, folder: Path, files: NodeFiles
) -> None:
    files.policy.write_bytes(b'version = "2"\ndefault = "none"\n[profiles.d]\n')
    Node(config_of(tmp_path, folder), StateDir(tmp_path))
    assert files.policy.read_bytes() == BUILT_IN_POLICY


def test_a_hello_needs_both_times(files: NodeFiles) -> None:
    heartbeat = Heartbeat(files.read_record(), files.write_record, Timing(), 0.0)
    with pytest.raises(NodeRefused):
        heartbeat.hello(FrontHello("f", 1, 2.0, 3.0, 10.0, instance="i"), 0.0)
