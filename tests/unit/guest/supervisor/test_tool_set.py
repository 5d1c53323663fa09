"""The session's tools as the supervisor keeps them: read from a frame, posted to each interpreter, closed."""

from __future__ import annotations

import json
import os

import pytest

from executor_server.backends.channel.tool_packing import packed_tools
from executor_server.core.model import BlobRef, ShippedTool, ToolSource, ToolSpec
from executor_server.guest.supervisor.tool_set import PartMissing, ToolSet, TooMuchShipped
from executor_server.guest.wire import link
from executor_server.guest.wire.frames import CHUNK_BYTES, FrameError
from executor_server.guest.wire.link_messages import LinkMessage, PlaceTools, ShipTools, ToolPart, placed_tools
from executor_server.guest.wire.messages import RegisterTools
from executor_server.guest.wire.tools import MAX_SHIPPED_BYTES
from tests.support.descriptors import none_left_open

HOST = ToolSpec("asked", "asks", ("q",), is_final_answer=True)
SOURCE = ToolSpec("a", "about", (), False, ShippedTool(ToolSource("x = 'ä'", "x", b"bindings"), ("json",)))
LARGE = ToolSpec("b", "", (), False, ShippedTool(ToolSource("y = 1", "y", BlobRef("blob", 7))))
VALUE = ToolSpec("c", "", (), False, ShippedTool(b"value"))


def read(*tools: ToolSpec, blobs: dict[str, bytes] | None = None) -> ToolSet:
    listed_bytes, body = packed_tools(tools)

    def take(blob_id: str) -> int | None:
        data = (blobs or {}).get(blob_id)
        return None if data is None else link.sealed_memfd([data])

    return ToolSet.read(RegisterTools(op=1, listed=listed_bytes), body, take)


class Posted:
    """Records the messages to an interpreter."""

    def __init__(self) -> None:
        self.messages: list[tuple[LinkMessage, bytes]] = []

    def __call__(self, message: LinkMessage, body: bytes = b"", memfd: int | None = None) -> None:
        if memfd is not None:
            body = link.read_memfd(memfd, os.fstat(memfd).st_size)
        self.messages.append((message, body))


def test_what_the_daemon_packs_is_posted_whole_and_as_often_as_needed() -> None:
    with none_left_open():
        tools = read(HOST, SOURCE, LARGE, VALUE, blobs={"blob": b"a large"})
        for again in (False, True):
            posted = Posted()
            tools.post_all(posted, again=again)
            *parts, (ship, listed) = posted.messages
            assert parts == [
                (ToolPart(tool="a", part="source"), "x = 'ä'".encode()),
                (ToolPart(tool="a", part="bindings"), b"bindings"),
                (ToolPart(tool="b", part="source"), b"y = 1"),
                (ToolPart(tool="b", part="bindings"), b"a large"),
                (ToolPart(tool="c", part="value"), b"value"),
            ]
            assert ship == ShipTools(again=again)
            assert [(tool.name, tool.entry, tool.modules) for tool in placed_tools(listed)] == [
                ("asked", "", None),
                ("a", "x", ["json"]),
                ("b", "y", []),
                ("c", "", []),
            ]
        assert tools.called == tools.final == {"asked"}
        assert tools.has_shipped
        tools.close()
        tools.close()


def test_an_interpreter_that_has_not_made_them_is_told_why() -> None:
    posted = Posted()
    tools = read(HOST, VALUE)
    tools.post_called(posted, "later")
    ((place, listed),) = posted.messages
    assert place == PlaceTools()
    assert [(tool.name, tool.why_not) for tool in placed_tools(listed)] == [("asked", None), ("c", "later")]


def test_what_is_forbidden_is_let_go_of_once_and_says_why() -> None:
    with none_left_open():
        tools = read(HOST, SOURCE, LARGE, VALUE, blobs={"blob": b"a large"})
        assert tools.forbid(["a", "c*"], "no more") == ["b"]
        assert tools.forbid(["a", "c*"], "no more") == []
        posted = Posted()
        tools.post_all(posted, again=True)
        assert {message.tool for message, _ in posted.messages if isinstance(message, ToolPart)} == {"a", "c"}
        assert tools.forbid([], "no more") == ["a", "c"]
        tools.post_called(posted, "later")
        listed = {tool.name: tool.why_not for tool in placed_tools(posted.messages[-1][1])}
        assert listed == {"asked": None, "a": "no more", "b": "no more", "c": "no more"}
        assert not tools.has_shipped


def test_bytes_that_are_not_there_are_missed_and_the_others_let_go() -> None:
    other = ToolSpec("d", "", (), False, ShippedTool(BlobRef("gone", 1)))
    with none_left_open(), pytest.raises(PartMissing, match="tool d"):
        read(LARGE, other, blobs={"blob": b"x"})


def test_what_is_shipped_is_measured_and_not_believed() -> None:
    large = bytes(MAX_SHIPPED_BYTES // 2)
    both = [ToolSpec(name, "", (), False, ShippedTool(BlobRef(name, 1))) for name in "ab"]
    with none_left_open():
        read(*both, blobs={"a": large, "b": large}).close()
        with pytest.raises(TooMuchShipped):
            read(*both, blobs={"a": large, "b": large + b"x"})


TOOL = {"name": "t", "description": "", "parameters": [], "final": False}
WRONG = {
    "no list": b"{}",
    "no JSON": b"[" * 100_000,
    "no objects": b"[1]",
    "too many": json.dumps([TOOL] * 257).encode(),
    "no name": json.dumps([{**TOOL, "name": 1}]).encode(),
    "no place": json.dumps([{**TOOL, "modules": [], "source": {}}]).encode(),
    "more than there is": json.dumps([{**TOOL, "modules": [], "source": {"inline": 1}}]).encode(),
    "modules that are none": json.dumps([{**TOOL, "modules": [1], "source": {"inline": 0}}]).encode(),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_frame_of_another_form_is_refused(what: str) -> None:
    with pytest.raises(FrameError):
        ToolSet.read(RegisterTools(op=1, listed=len(WRONG[what])), WRONG[what], lambda _: None)


def test_an_inline_value_is_no_larger_than_one_that_travels_inline() -> None:
    body = json.dumps([{**TOOL, "modules": [], "value": {"inline": CHUNK_BYTES + 1}}]).encode()
    with pytest.raises(FrameError):
        ToolSet.read(RegisterTools(op=1, listed=len(body)), body + bytes(CHUNK_BYTES + 1), lambda _: None)
