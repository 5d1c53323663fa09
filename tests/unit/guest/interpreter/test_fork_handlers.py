"""Functions that modules register for forks are called in the interpreter, once it begins, and in its own forks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from executor_server.guest.interpreter import inherited


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the list of what Python itself is given."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(inherited, "_register_at_fork", lambda **handlers: given.append(handlers))
    monkeypatch.setattr(inherited, "_deferred", [])
    monkeypatch.setattr(os, "register_at_fork", os.register_at_fork)  # put back at the end
    return given


def test_they_wait_for_the_interpreter_and_are_called_there_once(registered: list[dict[str, Any]]) -> None:
    called: list[str] = []
    inherited.defer_fork_handlers()
    os.register_at_fork(before=lambda: called.append("before"), after_in_child=lambda: called.append("child"))
    os.register_at_fork(after_in_parent=lambda: called.append("parent"))
    assert registered == []
    inherited.take_fork_handlers()
    assert called == ["child"]
    assert [sorted(handlers) for handlers in registered] == [["after_in_child", "before"], ["after_in_parent"]]
    inherited.take_fork_handlers()
    assert called == ["child"] and len(registered) == 2


def test_one_that_fails_keeps_no_other_from_its_turn(registered: list[dict[str, Any]]) -> None:
    called: list[str] = []
    inherited.defer_fork_handlers()
    os.register_at_fork(after_in_child=lambda: 1 / 0)
    os.register_at_fork(after_in_child=lambda: called.append("child"))
    inherited.take_fork_handlers()
    assert called == ["child"] and len(registered) == 2


def test_a_module_that_kept_the_function_registers_as_if_it_had_not(registered: list[dict[str, Any]]) -> None:
    inherited.defer_fork_handlers()
    kept: Callable[..., None] = os.register_at_fork
    inherited.take_fork_handlers()
    kept(before=print)
    assert registered == [{"before": print}]
