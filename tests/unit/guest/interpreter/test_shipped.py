"""Making shipped tools: all of a registration or none, and the tools that were there before."""

from __future__ import annotations

import builtins
import linecache
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executor_api.values import encode
from executor_server.guest.interpreter.shipped import ShippedTools, ToolsRefused
from executor_server.guest.wire.frames import MAX_MISSING_MODULES
from executor_server.guest.wire.link_messages import PlacedTool


@pytest.fixture
def tools() -> Iterator[Tools]:
    before = set(sys.modules), set(linecache.cache)
    tools = Tools()
    yield tools
    tools.shipped.clear({})
    left = {name for name in set(sys.modules) - before[0] if name.startswith("tool_")}
    assert (left, {name for name in set(linecache.cache) - before[1] if name.startswith("<tool-")}) == (set(), set())


class Tools:
    """The tools of an interpreter, and the calls that its meter guarded."""

    def __init__(self) -> None:
        self.guarded = 0
        self.shipped = ShippedTools(self._guarded)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        self.guarded += 1
        return function(*args)

    def stage(self, sources: dict[str, str], modules: dict[str, list[str]]) -> list[PlacedTool]:
        for name, text in sources.items():
            self.shipped.take_part(name, "source", text.encode())
        return [
            PlacedTool(
                name=name,
                description=f"about {name}",
                parameters=[],
                final=False,
                modules=modules.get(name, []),
                entry="tool",
            )
            for name in sources
        ]

    def make(self, stubs: dict[str, Any] | None = None, **sources: str) -> dict[str, Any]:
        return self.shipped.replace(self.stage(sources, {}), stubs or {})[0]

    def make_again(self, modules: dict[str, list[str]] | None = None, **sources: str) -> tuple[dict[str, Any], str]:
        return self.shipped.replace(self.stage(sources, modules or {}), {}, again=True)


def says(what: object) -> str:
    return f"def tool():\n    return {what!r}\n"


def test_what_runs_anything_of_the_clients_is_guarded(tools: Tools) -> None:
    made = tools.make(a=says(1), b=says(2))
    assert (made["a"](), made["b"](), tools.guarded) == (1, 2, 4)


def test_bindings_are_there_before_the_text_runs_and_may_not_be_shared(tools: Tools) -> None:
    text = "seen = list(table)\ntable.append(1)\ndef tool():\n    return seen, table\n"
    for name in ("a", "b"):
        tools.shipped.take_part(name, "bindings", encode({"table": ["x"]}))
    made = tools.make(a=text, b=text)
    assert made["a"]() == made["b"]() == (["x"], ["x", 1])


def test_a_description_is_the_doc_of_a_function_that_has_none(tools: Tools) -> None:
    made = tools.make(
        a=says(1), b='def tool():\n    """Its own."""', c="class T:\n    def __call__(self): pass\ntool = T()"
    )
    assert (made["a"].__doc__, made["b"].__doc__, made["c"].__doc__) == ("about a", "Its own.", None)


def test_pythons_builtins_are_not_changed_by_tools_and_go_before_them(tools: Tools) -> None:
    before = dict(vars(builtins))
    made = tools.make(
        {"asked": lambda: "asked", "len": lambda _: "no"},
        a="def tool():\n    return asked(), b(), len([1])\n",
        b=says(2),
    )
    assert made["a"]() == ("asked", 2, 1)
    assert vars(builtins) == before


def test_a_module_is_registered_as_long_as_its_tool(tools: Tools) -> None:
    tools.make(a=says(1), b=says(2))
    first = sys.modules["tool_a"]
    assert linecache.getline("<tool-a>", 2) == "    return 1\n"
    tools.make(a=says(3))
    assert sys.modules["tool_a"] is not first
    assert "tool_b" not in sys.modules
    assert linecache.getline("<tool-a>", 2) == "    return 3\n"


def test_a_refusal_leaves_everything_as_it_was(tools: Tools) -> None:
    made = tools.make({"asked": lambda: 1}, a="def tool():\n    return asked()\n", b=says(2))
    modules = {name: sys.modules[name] for name in ("tool_a", "tool_b")}
    with pytest.raises(ToolsRefused, match=r"^c: ZeroDivisionError: division by zero \(line 2 of its source\)$"):
        tools.make({"other": print}, a=says(3), c="x = 1\n1 / 0")
    assert {name: sys.modules.get(name) for name in ("tool_a", "tool_b", "tool_c")} == {**modules, "tool_c": None}
    assert (made["a"](), made["b"](), linecache.getline("<tool-b>", 2)) == (1, 2, "    return 2\n")
    assert linecache.getline("<tool-c>", 1) == ""


def test_a_module_of_that_name_that_is_none_of_ours_comes_back(tools: Tools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tool_a", builtins)
    with pytest.raises(ToolsRefused):
        tools.make(a="raise ValueError")
    assert sys.modules["tool_a"] is builtins


def test_no_code_runs_when_modules_are_missing(tools: Tools) -> None:
    specs = tools.stage(
        {"a": "raise KeyError", "b": says(1)}, {"b": ["json", "nowhere", "json.nothing", "sys.nothing"]}
    )
    with pytest.raises(ToolsRefused) as refused:
        tools.shipped.replace(specs, {})
    assert str(refused.value) == "b: the image has no module nowhere, json.nothing, sys.nothing"
    assert refused.value.modules == ["nowhere", "json.nothing", "sys.nothing"]


def test_so_many_modules_are_listed_as_a_frame_has_room_for(tools: Tools) -> None:
    specs = tools.stage({"a": says(1)}, {"a": [f"nowhere{n}" for n in range(100)]})
    with pytest.raises(ToolsRefused) as refused:
        tools.shipped.replace(specs, {})
    assert len(refused.value.modules) == MAX_MISSING_MODULES


def test_what_can_be_made_again_is_and_the_rest_says_why_it_is_not(tools: Tools) -> None:
    made, said = tools.make_again({"c": ["nowhere"]}, a=says(1), b="raise ValueError('twice')", c=says(3))
    assert said == "c: the image has no module nowhere; b: ValueError: twice (line 1 of its source)"
    assert made["a"]() == 1
    for name, why in (("b", "ValueError: twice"), ("c", "no module nowhere")):
        with pytest.raises(
            RuntimeError, match=f"the tool {name} is not available: it could not be made again: .*{why}"
        ):
            made[name](1, x=2)
    assert "tool_b" not in sys.modules
    assert "tool_c" not in sys.modules


def test_an_error_that_can_say_nothing_is_a_reason_too(tools: Tools) -> None:
    for text, said in (
        (
            "class E(BaseException):\n    def __str__(self): raise MemoryError\nraise E",
            "E: <its __str__ raised MemoryError>",
        ),
        ("raise SystemExit('x' * 100_000)", "SystemExit: " + "x" * 1000),
        ("raise StopIteration", "StopIteration: "),
    ):
        with pytest.raises(ToolsRefused) as refused:
            tools.make(a=text)
        assert f"a: {said} (line " in str(refused.value)
