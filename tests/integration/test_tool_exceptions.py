"""A tool's exception in the program: caught by the built-in class nearest to its own, with its arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.blocking import client_of
from tests.support.daemon import Daemon


@pytest.fixture(params=["sync", "async"], scope="module")
def session(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Any]:
    with client_of(request.param, daemon) as client, client.create_session() as session:
        yield session


class Missing(KeyError):
    pass


class Refused(ConnectionError):
    pass


class Strange(Exception):
    pass


def opened() -> None:
    Path("/nowhere/at all.txt").read_text()


def raised(error: Exception) -> Callable[[], None]:
    def tool() -> None:
        raise error

    return tool


TOOLS: dict[str, tuple[Callable[[], Any], str, Any]] = {
    "json": (lambda: json.loads("{"), "ValueError", "'json.decoder.JSONDecodeError: Expecting' in str(e)"),
    "unicode": (lambda: b"ab\xff".decode(), "UnicodeDecodeError", "(e.object, e.start, e.end) == (b'ab\\xff', 2, 3)"),
    "large unicode": (lambda: (b"\xff" * 10**6).decode(), "UnicodeDecodeError", "'byte 0xff in position 0' in str(e)"),
    "file": (opened, "FileNotFoundError", "(e.errno, e.filename) == (2, '/nowhere/at all.txt')"),
    "key": (raised(KeyError(("a", 1))), "KeyError", "e.args == (('a', 1),)"),
    "own key": (raised(Missing("k")), "KeyError", "e.args == ('k',) and str(e).endswith(\".Missing: 'k'\")"),
    "own errno": (raised(Refused(111, "no")), "ConnectionError", "e.errno == 111 and '.Refused: ' in str(e)"),
    "no plain values": (raised(Missing(object())), "KeyError", "'.Missing: <object' in str(e)"),
    "group": (
        raised(ExceptionGroup("some", [ValueError("x")])),
        "Exception",
        "'(1 sub-exception); ValueError: x' in str(e)",
    ),
    "none of these": (raised(Strange("why")), "Exception", "str(e).endswith('.Strange: why')"),
}


@pytest.mark.parametrize("name", TOOLS)
def test_it_is_caught_by_its_built_in_class_with_its_arguments(session: Any, name: str) -> None:
    function, kind, condition = TOOLS[name]
    session.register_tools({"tool": function})
    code = f"try:\n    tool()\nexcept {kind} as e:\n    seen = {condition} or (type(e), e.args, str(e))\nseen"
    result = session.execute(code)
    assert result.output is True, result
    uncaught = session.execute("tool()").error
    assert uncaught.type in {kind, "ToolError"} and uncaught.type in uncaught.traceback
