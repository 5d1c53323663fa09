"""Claims about the table of `executor-server fleet status`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from executor_server.daemon.cli import fleet as module
from executor_server.daemon.cli import main

NODE = {
    "node": "n" * 24,
    "link_address": "127.0.0.1:1",
    "address": "127.0.0.1:2",
    "state": "NODE_STATE_CONNECTING",
    "problem": "",
    "epoch": "1",
    "program_version": "12.34.56.dev789",
    "sessions": 1024,
    "creating": 16,
    "max_sessions": 1024,
    "warm": 128,
    "load": 12.34,
    "lease_left_s": -12.3,
    "labels": {},
}


def shown(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, Any], options: tuple[str, ...] = ()) -> str:
    answer = {"nodes": nodes, "front_id": "0123456789", "term": "3", "parked": 2, "control_fingerprint": "f"}
    monkeypatch.setattr(module, "asked", lambda access, ask: answer)
    done = CliRunner().invoke(main, ["fleet", "status", *options], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("state", ["connecting", "serving", "draining", "waiting", "silent", "lost", "refused"])
def test_the_widest_table_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    table = shown(monkeypatch, {**NODE, "state": f"NODE_STATE_{state.upper()}"})
    assert max(map(len, table.splitlines())) <= 80
    assert state in table


def test_problems_have_lines_of_their_own_and_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    output = shown(monkeypatch, {**NODE, "node": "", "problem": "no\x1b[31m way"})
    assert "127.0.0.1:1: no?[31m way" in output
    assert "2 requests wait" in output


def test_json_is_the_whole_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(shown(monkeypatch, NODE, options=("--json",)))["nodes"] == [NODE]
