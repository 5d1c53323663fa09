"""Watches of files, of both clients, over a daemon that dies meanwhile."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client import ExecutorClient, FileChange, NotFoundError, PreconditionError, Session
from tests.support.daemon import running_daemon


@pytest.fixture
def session(client: ExecutorClient) -> Iterator[Session]:
    with client.create_session() as made:
        yield made


def test_changes_are_iterated_over_from_the_moment_of_the_watch_on(session: Session) -> None:
    session.files.write("before", b"x")
    with session.files.watch() as watch:
        session.files.write("made", b"x")
        for changes in watch:
            assert not changes.overflowed
            assert list(changes) == [FileChange("made", "created", is_directory=False)]
            break
        session.execute("open('made', 'a').write('more')")
        assert [each.kind for each in next(iter(watch))] == ["changed"]


def test_a_watch_is_closed_from_another_thread(session: Session) -> None:
    watch = session.files.watch()
    threading.Timer(0.2, watch.close).start()
    assert list(watch) == []
    assert list(watch) == []


def test_what_is_no_directory_is_refused_and_the_end_of_a_session_is_an_error(client: ExecutorClient) -> None:
    session = client.create_session()
    with pytest.raises(NotFoundError, match="no 'missing'"):
        session.files.watch("missing")
    with session.files.watch() as watch:
        session.close()
        with pytest.raises((NotFoundError, PreconditionError)):
            next(iter(watch))


def test_a_killed_daemon_is_said_as_lost_changes_and_the_watch_goes_on() -> None:
    with tempfile.TemporaryDirectory(prefix="d-") as name:
        directory = Path(name)
        with running_daemon(directory) as first, ExecutorClient(**first.access) as client:
            session = client.create_session()
            watch = session.files.watch()
            first.kill()
            with running_daemon(directory):
                found = iter(watch)
                assert next(found).overflowed
                session.files.write("after", b"x")
                assert [each.path for each in next(found)] == ["after"]
                watch.close()
                session.close()
