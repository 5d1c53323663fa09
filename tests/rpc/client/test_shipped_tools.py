"""Tools with the placement "sandbox", as a daemon gets them, and what both clients make of what it says of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import grpc
import pytest

from executor_api import values
from executor_api.v1 import executor_service_pb2 as pb
from executor_client import InvalidRequest, Tool, ToolNotShippable
from tests.rpc.client.test_tools import answer
from tests.support.fake_daemon import Answered, FakeDaemon, Refusal, result, tool_call
from tests.support.shipped import plain, refused


def registered(daemon: FakeDaemon) -> list[Any]:
    """The tools of the last registration."""
    requests = [request for name, request in daemon.requests if name == "RegisterTools"]
    assert isinstance(requests[-1], pb.RegisterToolsRequest)
    return list(requests[-1].tools)


def test_a_shipped_tool_is_source_with_bindings_and_modules(session: Any, daemon: FakeDaemon) -> None:
    session.register_tools({"here": print, "there": Tool(plain.with_values, "Adds.", placement="sandbox")})
    here, there = registered(daemon)
    assert not here.HasField("shipped")
    source = there.shipped.source
    assert "def with_values():" in source.text and source.entry in source.text
    assert set(values.decode(source.bindings.packed.inline).values()) == {plain._DAY, plain._KINDS, plain._PRICE}
    assert list(there.shipped.modules) == ["datetime"]
    assert (there.description, list(there.parameters)) == ("Adds.", [])


def test_large_data_of_a_tool_travels_as_a_blob(session: Any, daemon: FakeDaemon) -> None:
    data = bytes(1_000_000)
    session.register_tools({"t": Tool(lambda: data, placement="sandbox")})
    (tool,) = registered(daemon)
    (uploaded,) = daemon.blobs.values()
    assert tool.shipped.source.bindings.packed.blob.size_bytes == len(uploaded)
    assert list(values.decode(uploaded).values()) == [data]


def test_a_call_of_a_shipped_tool_is_not_answered_here(session: Any, daemon: FakeDaemon) -> None:
    """A sandbox could ask for it in the tool's name; what runs there is not run here as well."""
    called: list[Any] = []

    class Noting:
        def __call__(self, *args: Any) -> None:
            called.append(args)

        def __reduce__(self) -> Any:
            return (list, ())

    session.register_tools({"t": Tool(Noting(), placement="sandbox")})
    daemon.journal = [tool_call("t", 1), Answered(), result()]
    session.execute("code")
    assert answer(daemon) == ("NameError", "no tool 't' is registered with this client")
    assert called == []


def test_a_tool_that_can_not_be_shipped_leaves_the_tools_as_they_are(session: Any, daemon: FakeDaemon) -> None:
    session.register_tools({"before": lambda: 1})
    with pytest.raises(ToolNotShippable):
        session.register_tools({"t": Tool(refused.use_closure, placement="sandbox")})
    assert [tool.name for tool in registered(daemon)] == ["before"]
    daemon.journal = [tool_call("before"), Answered(), result()]
    session.execute("code")
    assert answer(daemon) == 1


def test_missing_modules_are_explained(session: Any, daemon: FakeDaemon) -> None:
    missing = Refusal(grpc.StatusCode.INVALID_ARGUMENT, "MODULES_MISSING", "t: the image has no module cv2")
    daemon.refusals["RegisterTools"].append(missing)
    with pytest.raises(InvalidRequest, match="opencv-python-headless, pillow, scikit-learn") as raised:
        session.register_tools({"t": Tool(plain.with_libraries, placement="sandbox")})
    assert raised.value.reason == "MODULES_MISSING"


def test_sources_that_are_too_long_together_are_refused_here(session: Any, daemon: FakeDaemon, tmp_path: Path) -> None:
    """Text travels inline, and a message has room for so much."""
    file = tmp_path / "long_tools.py"
    file.write_text("".join(f"def f{number}():\n    return '{'x' * 800_000}'\n" for number in range(3)))
    spec = importlib.util.spec_from_file_location("long_tools", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(InvalidRequest, match="sources of the tools have 2400"):
        session.register_tools({f"f{n}": Tool(getattr(module, f"f{n}"), placement="sandbox") for n in range(3)})
    assert "RegisterTools" not in daemon.names()
