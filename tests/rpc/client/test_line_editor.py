"""The interactive editor: when a statement is sent, what Tab offers, where its history is kept."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from executor_client import ExecutorClient, Session
from executor_client.cli.line_editor import _editor, completions
from executor_client.cli.repl import Reader, is_complete
from tests.support.fake_daemon import TOKEN, FakeDaemon, Refusal, result


@pytest.fixture
def session(daemon: FakeDaemon) -> Iterator[Session]:
    with ExecutorClient(daemon.address, token=TOKEN) as client, client.create_session() as session:
        yield session


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as keys:
        yield keys


@pytest.fixture
def editor(session: Session, keys: PipeInput) -> Reader:
    return _editor(session, is_complete, input=keys, output=DummyOutput())


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ("x = 1\r", "x = 1"),
        ("f(\r1)\r", "f(\n1)\n"),
        ("def f():\rreturn 1\r\r", "def f():\n    return 1\n"),
        ("%import os\r", "%import os"),
        ("1 +* 2\r", "1 +* 2"),
    ],
)
def test_a_statement_is_sent_when_it_is_complete(keys: PipeInput, editor: Reader, typed: str, read: str) -> None:
    keys.send_text(typed)
    assert editor.read(">>> ") == read


def test_tab_at_the_beginning_of_a_line_indents(keys: PipeInput, editor: Reader) -> None:
    keys.send_text("if x:\r" + "\x7f" * 4 + "\ty\r\r")
    assert editor.read(">>> ") == "if x:\n    y\n"


@pytest.mark.parametrize(
    ("typed", "asked", "offered"),
    [
        ("np.li", "dir(np)", ["linalg"]),
        ("print(np.linalg.", "dir(np.linalg)", ["det", "linalg"]),
        ("x = de", "dir()", ["def", "del", "delattr", "det"]),
        ("np._", "dir(np)", ["__doc__", "_private"]),
    ],
)
def test_names_are_completed_from_the_sandbox(
    daemon: FakeDaemon, session: Session, typed: str, asked: str, offered: list[str]
) -> None:
    daemon.journal = [result(["linalg", "det", "_private", "__doc__", "no\x1bname", 7])]
    assert sorted(name for name, _ in completions(session, typed)) == sorted(offered)
    assert dict(daemon.requests)["Execute"].code == f"({asked}\n)"


@pytest.mark.parametrize("typed", ["f().x", "a[0].x", "'text'.x", "1.x"])
def test_nothing_is_called_to_complete_a_name(daemon: FakeDaemon, session: Session, typed: str) -> None:
    daemon.journal = [result([])]
    assert list(completions(session, typed)) == []
    assert "Execute" not in daemon.names()


def test_own_commands_are_completed_without_the_sandbox(daemon: FakeDaemon, session: Session) -> None:
    assert [name for name, _ in completions(session, "%im")] == ["%import", "%images"]
    assert "Execute" not in daemon.names()


def test_a_refusal_completes_nothing(daemon: FakeDaemon, session: Session) -> None:
    daemon.refusals["Execute"].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND"))
    assert list(completions(session, "a.b")) == []


def test_history_is_this_users_alone(
    keys: PipeInput, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXECUTOR_STATE_DIR", str(tmp_path / "state"))
    streams: dict[str, Any] = {"input": keys, "output": DummyOutput()}
    keys.send_text("secret = 1\r")
    _editor(session, is_complete, **streams).read(">>> ")
    file = tmp_path / "state" / "repl-history"
    assert "secret = 1" in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    keys.send_text("1\r")
    assert _editor(session, is_complete, **streams).read(">>> ") == "1"
    assert not (tmp_path / "elsewhere").exists()
