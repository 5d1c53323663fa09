"""Shipping tools as source: a shipped tool does the same elsewhere as here."""

from __future__ import annotations

import ast
import copyreg
import functools
import importlib.util
import linecache
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executor_api.values import decode
from executor_client import InvalidRequest, ToolNotShippable
from executor_client._shipping import Shipped, ship
from tests.support.interpreters import require_python
from tests.support.shipped import odd, plain, refused

ROOT = Path(__file__).parents[3]
HERE = "{}.{}".format(*sys.version_info[:2])

CORPUS: dict[str, tuple[Any, Any]] = {**plain.CORPUS, **odd.CORPUS}

_PROGRAM = """
import sys, types
sys.path.insert(0, {wire!r})
from executor_api.values import decode
for name, text, entry, bindings, calls in {tools!r}:
    module = sys.modules["tool_" + name] = types.ModuleType("tool_" + name)
    module.__dict__.update(decode(bindings) if bindings else {{}})
    exec(compile(text, "<tool-%s>" % name, "exec", dont_inherit=True), module.__dict__)
    tool = getattr(module, entry)
    print(name, ascii([tool(*call) for call in calls]))
"""


def run_elsewhere(python: str, tools: list[tuple[str, Shipped, Any]]) -> dict[str, str]:
    """Returns the results of the tools in another process, which has neither this client nor these tests."""
    described = [(name, tool.text, tool.entry, tool.bindings, calls) for name, tool, calls in tools]
    program = _PROGRAM.format(wire=str(ROOT / "proto"), tools=described)
    done = subprocess.run(
        [python, "-I", "-"], input=program, capture_output=True, text=True, env={}, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(" ", 1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def shipped() -> list[tuple[str, Shipped, Any]]:
    """The shipped tools of the whole corpus, made before any of them is called here."""
    return [(name, ship(name, tool, python=""), calls) for name, (tool, calls) in CORPUS.items()]


@pytest.fixture(scope="module")
def expected(shipped: list[tuple[str, Shipped, Any]]) -> dict[str, str]:
    return {name: ascii([tool(*call) for call in calls]) for name, (tool, calls) in CORPUS.items()}


def test_every_tool_is_the_same_in_another_process(
    shipped: list[tuple[str, Shipped, Any]], expected: dict[str, str]
) -> None:
    assert run_elsewhere(sys.executable, shipped) == expected


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.12", "3.13"])
def test_every_tool_is_the_same_on_another_python(
    version: str, shipped: list[tuple[str, Shipped, Any]], expected: dict[str, str]
) -> None:
    python = require_python(version)
    assert run_elsewhere(str(python), shipped) == expected


@pytest.mark.parametrize("name", refused.REFUSED)
def test_what_can_not_be_shipped_is_named_with_the_reason(name: str) -> None:
    tool, problems = refused.REFUSED[name]
    with pytest.raises(ToolNotShippable) as raised:
        ship(name, tool, python=HERE)
    assert (raised.value.tool, list(raised.value.problems)) == (name, problems)


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(InvalidRequest) as raised:
        ship("t", refused.use_closure, python=HERE)
    first, second = str(raised.value).splitlines()
    assert first == "the tool 't' can't be shipped into the sandbox; give it the placement \"host\":"
    assert second.startswith("  - lock: a _thread.lock can't be shipped")


@pytest.mark.parametrize(("tool", "returned"), [(refused.without_source, 5), (refused.patched, 4)])
def test_a_tool_without_source_is_carried_as_bytecode(tool: Any, returned: int) -> None:
    shipped = ship("t", tool, python=HERE + ".1")
    assert shipped.value is not None
    assert decode(shipped.value, foreign=_called_elsewhere) == str(returned)


def _called_elsewhere(data: memoryview) -> str:
    """Unpickles the tool in another process, as a sandbox does, and returns what it says of 2.

    In this one cloudpickle would take its class for the one that is here already, and replace the functions of that.
    """
    version, _, pickled = bytes(data).partition(b"\0")
    assert version == f"cp{HERE}".encode()
    program = "import pickle, sys; print(pickle.load(sys.stdin.buffer)(2))"
    done = subprocess.run([sys.executable, "-c", program], input=pickled, capture_output=True, timeout=60, check=True)
    return done.stdout.decode().strip()


def test_a_tool_without_source_is_refused_for_another_python() -> None:
    with pytest.raises(ToolNotShippable) as raised:
        ship("t", refused.patched, python="3.9.2")
    assert raised.value.problems == (
        "Patched.answer: its source is not available, or has changed since it was loaded",
        f"bytecode can't be sent instead: Python is {HERE} here and 3.9.2 in the sandbox",
    )


def test_source_that_changed_since_it_was_loaded_is_not_shipped(tmp_path: Path) -> None:
    """The file on disk has another tool than the one that runs here."""
    file = tmp_path / "edited_tool.py"
    file.write_text("def tool(x):\n    return x + 1\n")
    tool = _loaded(file).tool
    assert ship("t", tool, python="").text
    file.write_text("def tool(x):\n    return x + 100\n")
    linecache.checkcache(str(file))
    with pytest.raises(ToolNotShippable, match="has changed since it was loaded"):
        ship("t", tool, python="")


def _loaded(file: Path) -> Any:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_object_is_as_it_was() -> None:
    copyreg._slotnames(plain.Derived)  # type: ignore[attr-defined]  # which Python keeps in a class at its first copy
    before = [vars(plain.instance).copy(), dict(vars(plain.Derived)), plain.with_default.__defaults__]
    ship("instance", plain.instance, python="")
    ship("with_default", plain.with_default, python="")
    assert [vars(plain.instance), dict(vars(plain.Derived)), plain.with_default.__defaults__] == before


def test_modules_that_the_sandbox_must_have_are_listed() -> None:
    modules = ship("t", plain.with_libraries, python="").modules
    assert set(modules) == {"PIL", "cv2", "os.path", "sklearn.linear_model", "os"}


def test_the_cells_of_a_notebook_are_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are not files, and each statement is compiled by itself."""
    source = "import math\nrate = 3\ndef root(x):\n    return math.sqrt(x) * rate\ntool = lambda x: root(x) + rate\n"
    name = "/tmp/ipykernel_1/123.py"
    monkeypatch.setitem(linecache.cache, name, (len(source), None, source.splitlines(keepends=True), name))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for statement in ast.parse(source).body:
        exec(compile(ast.Module([statement], []), name, "exec", dont_inherit=True), namespace)
    assert run_elsewhere(sys.executable, [("t", ship("t", namespace["tool"], python=""), ((4,),))]) == {"t": "[9.0]"}


def test_a_chain_of_many_functions_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "chained_tool.py"
    lines = [f"def f{number}(x):\n    return f{number + 1}(x) + 1\n" for number in range(80)]
    file.write_text("\n".join([*lines, "def f80(x):\n    return x\n"]))
    assert run_elsewhere(sys.executable, [("t", ship("t", _loaded(file).f0, python=""), ((1,),))]) == {"t": "[81]"}


_WRITTEN = [
    b"def make(n):\r\n\tdef tool(x):\r\n\t\t# n\r\n\t\treturn (n,\r\n  x, '''a\r\n\tb''')\r\n\treturn tool\r\n",
    b"# coding: latin-1\ndef make(n):\n  def tool(x):\n    return n, x, 'caf\xe9', \\\n'b'\n  return tool",
    b"def make(n):\n class Tool:\n  \x0c\n  text = f'''\n{n}\n'''\n  def __call__(self, x, y=n): return self.text, x, y\n"
    b" return Tool()",
    b"def make(n):\n    tool = lambda x, y=[n]: (\n      [x\n], y, lambda: n)[:2]; setattr(tool, 'a b', n)\n    return tool",
]


@pytest.mark.parametrize("source", _WRITTEN)
def test_a_file_may_be_written_as_files_are(tmp_path: Path, source: bytes) -> None:
    file = tmp_path / "written_tool.py"
    file.write_bytes(source)
    tool = _loaded(file).make(5)
    shipped = ship("t", tool, python="")
    assert run_elsewhere(sys.executable, [("t", shipped, ((1,),))]) == {"t": ascii([tool(1)])}


def test_what_is_nested_too_deeply_is_refused() -> None:
    inner: list[Any] = [object()]
    for _ in range(500):
        inner = [inner]
    with pytest.raises(ToolNotShippable, match=r"too many objects|too deeply"):
        ship("t", functools.partial(len, inner), python="")


def test_another_tool_of_the_session_is_called_and_not_shipped() -> None:
    shipped = ship("t", plain.with_helpers, python="", others={"first": plain._first})
    assert "_second" not in shipped.text
    assert "_first = _shipped_other('first')" in shipped.text
