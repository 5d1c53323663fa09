"""The state of a session, as users save and restore it: with real daemons, and from one backend to another."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from executor_client import (
    AsyncExecutorClient,
    AuthorizationError,
    Checkpoint,
    ExecutorClient,
    InvalidRequest,
    NotFoundError,
    PolicyViolationError,
    ResourceExhaustedError,
    Session,
)
from tests.support.audit import records
from tests.support.backend_daemon import daemon_on
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of, running_daemon
from tests.support.fleet_daemon import wanted
from tests.support.rounds import usual

PROGRAM = """
import numpy as np
class Model:
    def __init__(self, weights):
        self.weights = weights
    def predict(self, x):
        return float((self.weights * x).sum()) + bias
model = Model(np.arange(4.0))
bias = 0.5
history = [model.predict(1)]
also = history
stuck = (n for n in history)
with open('notes.txt', 'w') as file:
    file.write('kept')
del file
"""
GOES_ON = "also.append(model.predict(2)); (history, also is history, open('notes.txt').read())"
GONE_ON = ([6.5, 12.5], True, "kept")


def begun(client: ExecutorClient) -> Session:
    session = client.create_session(authorized_imports=["numpy"])
    session.execute(PROGRAM).raise_for_outcome()
    return session


def test_a_session_goes_on_in_another_one(client: ExecutorClient, tmp_path: Path) -> None:
    with begun(client) as session:
        state = session.export_state()
        assert session.execute("len(history)").output == 1  # nothing has changed
    assert state.manifest is not None and "model" in state.manifest.variables
    assert list(state.manifest.omitted_variables) == ["stuck"] and state.manifest.files == 1
    state.save(tmp_path / "state")
    loaded = Checkpoint.load(tmp_path / "state")
    assert loaded == state and loaded.manifest is None
    for archive in (state, loaded, bytes(state)):
        with client.create_session(authorized_imports=["numpy"], state=archive) as other:
            assert other.restored is not None and not other.restored.omitted_variables
            assert other.execute(GOES_ON).output == GONE_ON


def test_a_large_state_travels_whole(client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["random", "hashlib"]) as session:
        session.execute("import random\nlarge = random.Random(1).randbytes(20_000_000)").raise_for_outcome()
        session.put_file("large.bin", os.urandom(5_000_000))
        digest = "import hashlib\nhashlib.sha256(large + open('large.bin', 'rb').read()).hexdigest()"
        expected = session.execute(digest).output
        state = session.export_state()
    with client.create_session(authorized_imports=["random", "hashlib"], state=state) as other:
        assert other.execute(digest).output == expected


@pytest.mark.parametrize("harm", ["cut", "flipped", "garbage", "empty header", "signature of nobody"])
def test_what_is_no_whole_state_is_refused_and_leaves_no_session(client: ExecutorClient, harm: str) -> None:
    with client.create_session() as session:
        session.execute("a = 1").raise_for_outcome()
        good = bytes(session.export_state())
    bad = {
        "cut": good[: len(good) // 2],
        "flipped": good[:-100] + bytes([good[-100] ^ 1]) + good[-99:],
        "garbage": os.urandom(1000),
        "empty header": good[:20] + b"\0\0\0\0" + good[20:],
        "signature of nobody": good[:-32] + bytes(32),
    }[harm]
    with pytest.raises(InvalidRequest) as refused:
        client.create_session(state=bad)
    assert refused.value.reason == "STATE_INVALID"
    assert client.list_sessions() == []


def test_what_can_be_no_state_is_refused_at_once(client: ExecutorClient) -> None:
    for wrong in (b"", "text", 1):
        with pytest.raises(InvalidRequest):
            client.create_session(state=wrong)  # type: ignore[arg-type]
    assert client.list_sessions() == []


def test_a_session_with_a_state_can_be_written_down_again(client: ExecutorClient) -> None:
    with begun(client) as session:
        state = session.export_state()
    for _ in range(2):
        with client.create_session(authorized_imports=["numpy"], state=state) as other:
            other.execute("history.append(0.0)").raise_for_outcome()
            state = other.export_state()
    with client.create_session(authorized_imports=["numpy"], state=state) as last:
        assert last.execute("(history, also is history, model.predict(1))").output == ([6.5, 0.0, 0.0], True, 6.5)


def test_a_tenant_does_not_get_anothers_state_unless_the_policy_allows(tmp_path: Path) -> None:
    require("local")
    policy = (
        'default = "d"\n[profiles.d]\n[profiles.open.state]\nallow_foreign = true\n[profiles.closed.state]\nexport = false\nrestore = false\n'
        '[profiles.small.state]\nmax_bytes = 20000\n[tenants.open]\nprofile = "open"\n[tenants.closed]\nprofile = "closed"\n[tenants.small]\nprofile = "small"\n'
    )
    with daemon_of("pool.size = 0\n", policy=policy) as daemon:
        with ExitStack() as stack:
            mine = stack.enter_context(daemon.client())
            with mine.create_session() as session:
                session.execute("a = 1").raise_for_outcome()
                state = session.export_state()
            other, opened, closed, small = (
                stack.enter_context(daemon.client_of(each)) for each in ("other", "open", "closed", "small")
            )
            with pytest.raises(AuthorizationError) as foreign:
                other.create_session(state=state)
            assert foreign.value.reason == "STATE_FOREIGN" and other.list_sessions() == []
            with opened.create_session(state=state) as session:
                assert session.execute("a").output == 1
            with closed.create_session() as session, pytest.raises(PolicyViolationError) as denied:
                session.export_state()
            assert denied.value.violations[0].rule == "profiles.closed.state.export"
            with pytest.raises(PolicyViolationError):
                closed.create_session(state=state)
            with small.create_session() as session:
                session.put_file("large", bytes(30_000))
                with pytest.raises(ResourceExhaustedError) as large:
                    session.export_state()
                assert large.value.reason == "TOO_LARGE"
        audited = [each for each in records(daemon.state_dir / "audit") if each["kind"].startswith("state_")]
        assert {each["kind"] for each in audited} == {"state_requested", "state_exported", "state_restored"}
        assert [each["foreign"] for each in audited if each["kind"] == "state_restored"] == [True]
        assert not list((daemon.state_dir / "states").iterdir())


@pytest.fixture
def key_file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "key"
    file.write_text("k" * 43)
    file.chmod(0o600)
    yield file


@pytest.mark.parametrize("backend", usual(["local", "e2b"], but=("e2b",)))
def test_a_state_of_docker_goes_on_elsewhere_and_back(key_file: Path, backend: str) -> None:
    if wanted():
        pytest.skip("the nodes of a fleet have their key from their front")
    config = f'[state]\nkey_file = "{key_file}"\n[pool]\nsize = 0\n'
    with daemon_on("docker", config) as docker, daemon_on(backend, config) as elsewhere, ExitStack() as stack:
        there, here = stack.enter_context(docker.client()), stack.enter_context(elsewhere.client())
        with begun(there) as session:
            state = session.export_state()
        with here.create_session(authorized_imports=["numpy"], state=state) as other:
            assert other.info.backend == backend and session.info.backend == "docker"
            assert other.restored is not None and not other.restored.omitted_variables
            assert other.execute(GOES_ON).output == GONE_ON
            back = other.export_state()
        with there.create_session(authorized_imports=["numpy"], state=back) as again:
            assert again.execute("also is history and len(also)").output == 2


def test_a_state_of_a_daemon_with_another_key_is_foreign(client: ExecutorClient, key_file: Path) -> None:
    with daemon_of(f'[state]\nkey_file = "{key_file}"\n[pool]\nsize = 0\n') as other, ExitStack() as stack:
        session = stack.enter_context(stack.enter_context(other.client()).create_session())
        session.execute("a = 1").raise_for_outcome()
        state = session.export_state()
    with pytest.raises(AuthorizationError) as refused:
        client.create_session(state=state)
    assert refused.value.reason == "STATE_FOREIGN"


async def test_a_task_that_is_cancelled_while_it_restores_leaves_no_session(daemon: Daemon) -> None:
    async with AsyncExecutorClient(**daemon.access) as client:
        async with await client.create_session() as session:
            await session.execute("a = bytes(30_000_000)")
            state = await session.export_state()
        task = asyncio.create_task(client.create_session(state=state))
        while not await client.list_sessions():  # noqa: ASYNC110 (what is waited for happens in the daemon)
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises((asyncio.CancelledError, NotFoundError)):
            await task
        assert await client.list_sessions() == []


def test_a_daemon_that_died_after_it_restored_answers_as_before() -> None:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with running_daemon(directory) as first:
        with first.client() as client, client.create_session() as session:
            session.execute("a = [1]").raise_for_outcome()
            state = session.export_state()
        with first.client() as client:
            begun_with = client.create_session(state=state, detached=True)  # its client ends before the daemon
            begun_with.execute("a.append(2)").raise_for_outcome()
        first.kill()
        with running_daemon(directory) as second, second.client() as client:
            found = client.get_session(begun_with.session_id)
            found._begin_with(bytes(state))
            assert found.restored == begun_with.restored and found.execute("a").output == [1, 2]
            with client.create_session(state=found.export_state()) as again:
                assert again.execute("a").output == [1, 2]
    shutil.rmtree(directory)
