"""The supervisor has the children that it needs, when it needs them."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_server.guest.supervisor import checking, child_processes
from executor_server.guest.supervisor.child import Child, end_child, spawn
from executor_server.guest.supervisor.child_processes import ChildProcesses
from executor_server.guest.wire import link
from executor_server.guest.wire.link_messages import Booted, Check, LinkMessage, Unfit, message_of
from executor_server.guest.wire.loop import Loop
from tests.support.clock import Clock
from tests.support.descriptors import none_left_open


class Children:
    """Real processes, each of which only waits to be killed."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.forked: list[str] = []
        self.said: list[object] = []
        self.programs = SimpleNamespace(load=lambda: None, interpreter=_wait, checker=_wait)
        config = SimpleNamespace(preload=[])
        supervisor = SimpleNamespace(
            on_message=lambda packet: self.said.append(type(message_of(packet))),
            on_interpreter_exit=self.said.append,
        )
        background = SimpleNamespace(leaders=frozenset())
        copies = SimpleNamespace(pids=lambda _interpreter: frozenset())
        self.owner = ChildProcesses(*cast(Any, (config, self.loop, self.programs, supervisor, background, copies)))

    @property
    def has_checker(self) -> bool:
        return self.owner._checker is not None

    def end(self) -> None:
        self.owner.rest()
        interpreter = self.owner._interpreter
        if interpreter is not None:
            end_child(interpreter)
            interpreter.close()
            self.owner.interpreter.close()
        self.loop.close()


def _say(*messages: LinkMessage) -> Callable[..., None]:
    """Returns the program of an interpreter that says this, and ends."""

    def program(sock: socket.socket, *_: object) -> None:
        for message in messages:
            link.send(cast(Any, sock), message)
        os._exit(0)

    return program


def _wait(*_: object) -> None:
    signal.pause()
    os._exit(0)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[Children]:
    with none_left_open():
        made = Children()
        yield made
        made.end()


def test_a_sandbox_without_a_session_has_no_checker(children: Children) -> None:
    """It may wait in a pool for hours, and a checker takes 2 MiB."""
    children.owner.start()
    assert children.owner.due == float("inf")
    assert not children.has_checker


def test_a_session_has_a_checker_soon_after_its_answer(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork takes as long as all the rest of a warm session's beginning, for which its client waits."""
    clock = Clock()
    monkeypatch.setattr(child_processes, "time", clock)
    children.owner.start()
    children.owner.serve_session()
    assert not children.has_checker
    assert children.owner.due == clock.now_s + checking.CHECKER_START_S
    children.owner.on_due()
    assert children.has_checker


def test_a_session_that_comes_before_the_children_finds_a_checker_with_them(children: Children) -> None:
    children.owner.serve_session()
    assert not children.has_checker
    children.owner.start()
    assert children.has_checker


def test_a_checker_rests_whether_a_source_came_or_not(children: Children, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(child_processes, "time", clock)
    children.owner.start()
    children.owner.serve_session()
    children.owner.on_due()
    assert children.owner.due == clock.now_s + checking.CHECKER_REST_S
    clock.now_s += 5
    children.owner.check(Check(filename="<execution-1>", mode="", rules=0), b"1")
    assert children.owner.due == clock.now_s + checking.CHECKER_REST_S
    children.owner.on_due()
    assert not children.has_checker
    children.owner.check(Check(filename="<execution-2>", mode="", rules=0), b"1")
    assert children.has_checker


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Limits the number of processes; whoever kills all others to make room fails, because this is not process 1."""
    forked: list[int] = []

    def limited(most: int) -> None:
        def fork(target: Callable[[socket.socket], None]) -> Child:
            if sum(_exists(pid) for pid in forked) >= most:
                raise BlockingIOError
            child = spawn(target)
            forked.append(child.pid)
            return child

        monkeypatch.setattr(child_processes, "spawn", fork)

    return limited


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_checker_that_no_source_needs_yet_takes_no_room(children: Children, limit: Callable[[int], None]) -> None:
    """At the end of a branch it killed the interpreter and all processes of the session."""
    limit(1)
    children.owner.serve_session()
    children.owner.start()
    children.owner.have_checker()
    assert not children.has_checker
    assert children.owner.due == float("inf")


def test_a_worn_checker_gives_its_room_to_the_next(children: Children, limit: Callable[[int], None]) -> None:
    """It had not ended when the next one was forked, and everything was killed to make room."""
    limit(2)
    children.owner.serve_session()
    children.owner.start()
    children.owner.renew_checker()
    assert children.has_checker


@pytest.mark.parametrize(("said", "taken"), [(Booted(), [Booted]), (Unfit(why="broken"), [])])
def test_an_interpreter_that_ends_before_it_is_read_has_started_if_it_said_so(
    children: Children, said: LinkMessage, taken: list[object]
) -> None:
    """Three that have not started end the sandbox. The supervisor may get less time than the programs that end them."""
    children.programs.interpreter = _say(said)
    children.owner.start()
    interpreter = children.owner._interpreter
    assert interpreter is not None
    os.waitid(os.P_PID, interpreter.pid, os.WEXITED | os.WNOWAIT)
    children.owner.reap()
    assert children.said == [*taken, 0]
    children.owner.interpreter.close()
