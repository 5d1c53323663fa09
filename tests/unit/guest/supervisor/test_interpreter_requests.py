"""Requests to an interpreter that answers wrongly, late or never: the caller gets a refusal, and nothing stays open."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_server.backends.channel.tool_packing import packed_tools
from executor_server.core.model import BlobRef, ShippedTool, ToolSpec
from executor_server.guest.supervisor.interpreter_requests import REQUEST_TIME_S, Requests
from executor_server.guest.wire import link
from executor_server.guest.wire.frames import Fields, FrameError
from executor_server.guest.wire.link_messages import (
    Answered,
    EndBranch,
    LinkMessage,
    PlaceTools,
    ShipTools,
    ToolPart,
    Variable,
)
from executor_server.guest.wire.messages import GetVariables, RegisterTools
from tests.support.descriptors import none_left_open

SHIPPED = ToolSpec("a", "", (), False, ShippedTool(BlobRef("blob", 3)))
HOST = ToolSpec("asked", "", (), False)


class Bench:
    """Requests, and what they say to the daemon, the interpreter and the next result."""

    def __init__(self) -> None:
        self.answers: list[tuple[Any, ...]] = []
        self.posted: list[type[LinkMessage]] = []
        self.notices: list[str] = []
        self.runner: Any = SimpleNamespace(tool_calls=SimpleNamespace(tools=frozenset(), final_tools=frozenset()))
        channel: Any = SimpleNamespace(
            done=lambda op, *body, **head: self.answers.append(("done", op)),
            fail=lambda op, reason, message, body=b"": self.answers.append((reason, op, message, body)),
        )
        child_processes: Any = SimpleNamespace(post=self._post, started=True)
        results: Any = SimpleNamespace(notify=self.notices.append)
        transfers: Any = SimpleNamespace(take_blob=lambda blob_id: link.sealed_memfd([b"xyz"]))
        self.requests = Requests(channel, child_processes, transfers, cast(Any, self.runner), results)

    def _post(
        self, message: LinkMessage, body: bytes = b"", memfd: int | None = None, fds: tuple[int, ...] = ()
    ) -> None:
        if memfd is not None:
            link.read_memfd(memfd, 3)
        self.posted.append(type(message))

    def register(self, *tools: ToolSpec) -> None:
        listed_bytes, body = packed_tools(tools)
        self.requests.begin(RegisterTools(op=7, listed=listed_bytes), body)

    def answer(self, body: Any = None, **head: Any) -> None:
        self.requests.on_answer(Answered.read(Fields(head)), b"" if body is None else json.dumps(body).encode())


@pytest.fixture
def bench() -> Iterator[Bench]:
    with none_left_open():
        bench = Bench()
        yield bench
        bench.requests.close_all()


def test_tools_are_the_sessions_when_they_have_been_made(bench: Bench) -> None:
    bench.register(HOST)
    assert (bench.answers, bench.runner.tool_calls.tools, bench.requests.busy) == ([("done", 7)], {"asked"}, False)
    bench.register(SHIPPED)
    assert (len(bench.answers), bench.runner.tool_calls.tools, bench.requests.busy) == (1, {"asked"}, True)
    bench.answer(ok=True)
    assert (bench.answers[1:], bench.runner.tool_calls.tools, bench.requests.busy) == (
        [("done", 7)],
        frozenset(),
        False,
    )


def test_a_refusal_says_why_and_leaves_the_tools_before(bench: Bench) -> None:
    bench.register(HOST)
    bench.register(SHIPPED)
    bench.answer(ok=False, message="because")
    bench.register(SHIPPED)
    bench.answer(["json", "os.path"], ok=False, message="these")
    assert bench.answers[1:] == [
        ("tool_refused", 7, "because", b""),
        ("modules_missing", 7, "these", b'["json","os.path"]'),
    ]
    assert bench.runner.tool_calls.tools == {"asked"}


WRONG: dict[str, tuple[dict[str, Any], Any]] = {
    "no verdict": ({"message": "x"}, None),
    "a verdict that is none": ({"ok": 1}, None),
    "a message that is none": ({"ok": False, "message": 5}, None),
    "a long message": ({"ok": False, "message": "x" * 4001}, None),
    "a list that is none": ({"ok": False, "message": ""}, {}),
    "a list of anything": ({"ok": False, "message": ""}, [1]),
    "a long list": ({"ok": False, "message": ""}, ["x"] * 1025),
}


@pytest.mark.parametrize("what", WRONG)
def test_after_an_answer_that_is_wrong_the_end_of_the_interpreter_is_the_answer(bench: Bench, what: str) -> None:
    head, body = WRONG[what]
    for ask in (
        lambda: bench.register(SHIPPED),
        lambda: bench.requests.begin(GetVariables(op=7), b"[]"),
    ):
        ask()
        with pytest.raises(FrameError):
            bench.answer(body, **head)
        assert bench.requests.busy
        bench.requests.on_interpreter_replaced()
    assert [answers[0] for answers in bench.answers] == ["tool_refused", "value_refused"]


def test_an_interpreter_that_hangs_is_due_unless_it_is_the_daemon_that_keeps_it_waiting(bench: Bench) -> None:
    assert bench.requests.due == float("inf")
    before = time.monotonic()
    bench.register(SHIPPED)
    first = bench.requests.due
    assert before + REQUEST_TIME_S <= first <= time.monotonic() + REQUEST_TIME_S
    bench.requests.postpone()
    assert bench.requests.due >= first


def test_a_request_with_a_time_of_its_own_keeps_it_when_it_is_postponed(bench: Bench) -> None:
    bench.requests.ask(EndBranch(), (), lambda _answer, _body: None, 3.0)
    for _ in range(2):
        assert bench.requests.due <= time.monotonic() + 3.0
        bench.requests.postpone()


def test_tools_are_made_again_in_the_next_interpreter_and_not_in_the_one_after_if_that_ends_it(bench: Bench) -> None:
    bench.register(SHIPPED)
    bench.answer(ok=True)
    bench.requests.on_interpreter_replaced()
    assert bench.requests.tools_due
    bench.requests.make_tools_again()
    assert (bench.posted[-2:], bench.requests.tools_due) == ([ToolPart, ShipTools], False)
    bench.answer(ok=True, message="a: no")
    assert bench.notices == ["tools could not be made again in the new interpreter: a: no\n"]
    bench.requests.on_interpreter_replaced()
    bench.requests.make_tools_again()
    bench.requests.on_interpreter_replaced()
    assert (bench.posted[-1], bench.requests.tools_due) == (PlaceTools, False)
    assert bench.notices[1:] == [
        "the interpreter died or hung while its tools were made again; they are no longer available\n"
    ]
    bench.requests.on_interpreter_replaced()
    assert not bench.requests.tools_due
    bench.register(SHIPPED)
    bench.answer(ok=True)
    bench.requests.on_interpreter_replaced()
    assert bench.requests.tools_due


def test_a_variable_that_nobody_asked_for_stays_its_messages(bench: Bench) -> None:
    """The receiver of the message closes its descriptor: not twice, and not never."""
    packet = link.Packet(Fields({}), b"", link.sealed_memfd([b"x"]), 1, [])
    with pytest.raises(FrameError):
        bench.requests.on_variable(Variable(name="x"), packet)
    assert packet.memfd is not None
    packet.close()
