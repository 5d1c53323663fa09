"""The policy changes while the daemon works: under load, in the middle of a write, right before a kill."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from executor_client import ExecutorClient, Outcome, Session
from executor_server.policy.file import parse_policy
from tests.chaos.conftest import StartDaemon
from tests.chaos.observe import WAIT_S, executing
from tests.support.daemon import Daemon
from tests.support.polling import eventually
from tests.support.rounds import rounds

RELOADS = rounds(50, 6)
SESSIONS = 8
CONFIG = 'pool.size = 2\npolicy.file = "{path}"'
POLICY = """\
version = "{version}"
default = "everybody"

[profiles.everybody]
on_reload = "{on_reload}"
imports.denied = {denied}
"""


class PolicyAuthor:
    """Writes policies, and knows those that may be in force: from the last that was seen to the last written."""

    def __init__(self, directory: Path, on_reload: str) -> None:
        self.path = directory / "policy.toml"
        self._on_reload = on_reload
        self.fingerprints: list[str] = []
        self.seen = 0
        self.write()

    @property
    def last(self) -> int:
        return len(self.fingerprints) - 1

    def text(self, *denied: str) -> str:
        return POLICY.format(version=self.last + 1, on_reload=self._on_reload, denied=list(denied))

    def write(self, *denied: str) -> None:
        """Writes a new file and renames it, so that the policy changes at once."""
        text = self.text(*denied)
        self.fingerprints.append(parse_policy(text.encode(), self.path).fingerprint)
        beside = self.path.with_suffix(".new")
        beside.write_text(text)
        beside.rename(self.path)

    def bring_into_force(self, client: ExecutorClient, *denied: str) -> None:
        self.write(*denied)
        assert eventually(lambda: client.get_policy().policy.fingerprint == self.fingerprints[-1], timeout_s=WAIT_S)
        self.seen = self.last

    @contextmanager
    def noting(self, found: list[tuple[int, str, int]]) -> Iterator[Callable[[str], None]]:
        """Notes a fingerprint, which must be between the last seen and the last written."""
        seen = self.seen
        yield lambda fingerprint: found.append((seen, fingerprint, self.last))

    def all_were_in_force(self, found: list[tuple[int, str, int]]) -> bool:
        return all(fingerprint in self.fingerprints[seen : last + 1] for seen, fingerprint, last in found)


@pytest.mark.timeout(240)
def test_reloads_under_load_lose_nothing_and_every_result_names_a_policy_of_its_time(
    start: StartDaemon, directory: Path
) -> None:
    author = PolicyAuthor(directory, "tighten")
    daemon = start(CONFIG.format(path=author.path))
    executed: list[tuple[int, str, int]] = []
    created: list[tuple[int, str, int]] = []
    over = threading.Event()

    def work(session: Session) -> int:
        for count in itertools.count(1):
            with author.noting(executed) as note:
                result = session.execute("mine = globals().get('mine', 0) + 1\nprint(mine)\nmine")
                assert (result.outcome, result.output) == (Outcome.SUCCEEDED, count), result
                note(result.policy_fingerprint)
            if over.is_set():
                return count
        raise AssertionError

    def come_and_go(client: ExecutorClient) -> int:
        for count in itertools.count(1):
            with author.noting(created) as note, client.create_session() as session:
                note(session.policy.fingerprint)
                assert session.execute("6 * 7").output == 42
            if over.is_set():
                return count
        raise AssertionError

    with daemon.client() as client, ThreadPoolExecutor(SESSIONS + 1) as threads:
        sessions = [client.create_session() for _ in range(SESSIONS)]
        jobs = [threads.submit(work, session) for session in sessions]
        jobs.append(threads.submit(come_and_go, client))
        try:
            for number in range(RELOADS):
                author.bring_into_force(client, f"module{number}")
        finally:
            over.set()
        counts = [job.result(WAIT_S) for job in jobs]
        assert min(counts) > 1
        assert author.all_were_in_force(created)
        assert author.all_were_in_force(executed)
        assert len({fingerprint for _, fingerprint, _ in executed}) > RELOADS // 2
        for session in sessions:
            assert session.generation == 1
            session.close()


def test_a_policy_that_is_written_piece_by_piece_is_taken_when_it_is_whole(start: StartDaemon, directory: Path) -> None:
    author = PolicyAuthor(directory, "end")
    daemon = start(CONFIG.format(path=author.path))
    with daemon.client() as client, client.create_session() as session:
        text = author.text("os")
        with author.path.open("w") as file:
            file.write(text[: len(text) // 2])
            file.flush()
            assert eventually(lambda: "policy_refused" in daemon.log.read_text())
            assert session.execute("6 * 7").output == 42
            assert client.get_policy().policy.fingerprint == author.fingerprints[0]
            file.write(text[len(text) // 2 :])
        assert eventually(lambda: client.get_policy().policy.version == "1")
        assert eventually(lambda: not client.list_sessions())
        assert daemon.log.read_text().count("policy_refused") == 1


def test_a_session_is_held_to_the_new_policy_though_the_daemon_is_killed_right_after_the_reload(
    start: StartDaemon, directory: Path
) -> None:
    """A running execution continues, a queued one runs under its old policy, and the next is held to the new one."""
    author, queued = PolicyAuthor(directory, "tighten"), threading.Event()
    daemon = start(CONFIG.format(path=author.path))
    with daemon.client() as client, ThreadPoolExecutor(1) as threads:
        session = client.create_session(authorized_imports=["os.*"])
        code = (
            "import os, time\nprint('here', flush=True)\nwhile not os.path.exists('go'): time.sleep(0.01)\nimport os\n1"
        )
        with executing(session, code) as running:
            author.bring_into_force(client, "os")
            waiting = threads.submit(session.execute, "import os", on_event=lambda _: queued.set())
            assert queued.wait(WAIT_S)
            daemon.kill()
            daemon = start(CONFIG.format(path=author.path))
            session.put_file("go", b"")
        first, second = running.result(WAIT_S), waiting.result(WAIT_S)
        assert (first.outcome, first.output) == (Outcome.SUCCEEDED, 1)
        assert second.outcome is Outcome.IMPORT_DENIED
        assert [first.policy_fingerprint, second.policy_fingerprint] == author.fingerprints
        assert session.execute("import os").outcome is Outcome.IMPORT_DENIED
        assert session.execute("'still here'").output == "still here"
        session.close()


def test_a_policy_that_changed_while_no_daemon_ran_is_followed_at_its_start(
    start: StartDaemon, directory: Path
) -> None:
    author = PolicyAuthor(directory, "end")
    daemon: Daemon = start(CONFIG.format(path=author.path))
    with daemon.client() as client:
        client.create_session()
        daemon.kill()
        author.write("os")
        start(CONFIG.format(path=author.path))
        assert eventually(lambda: not client.list_sessions())
