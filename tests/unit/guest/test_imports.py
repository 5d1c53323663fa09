from __future__ import annotations

import ast
import importlib
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smolagents.local_python_executor import InterpreterError, LocalPythonExecutor, check_import_authorized

from executor_server.guest.imports import (
    ImportDenied,
    find_denied,
    guard_importlib,
    is_authorized,
    make_import,
    refusal,
    validate_pattern,
)
from tests.support.agent_program import Agent

_PARTS = st.sampled_from(["a", "b", "ab", "*"])
_PATTERNS = st.lists(st.lists(_PARTS, min_size=1, max_size=4).map(".".join), max_size=4)


@given(st.lists(_PARTS, min_size=1, max_size=4).map(".".join), _PATTERNS)
def test_rules_are_those_of_smolagents(module: str, patterns: list[str]) -> None:
    assert is_authorized(module, patterns) == check_import_authorized(module, patterns)


@pytest.mark.parametrize(
    ("module", "patterns", "authorized"),
    [
        ("numpy", ["numpy"], True),
        ("numpy.random", ["numpy"], False),
        ("numpy.random", ["numpy.*"], True),
        ("numpy", ["numpy.*"], True),
        ("numpy.random.mtrand", ["numpy.random"], False),
        ("os", ["os.path"], True),
        ("os.path", ["os.path"], True),
        ("os.path", ["os"], False),
        ("reprlib", ["re"], False),
        ("re", ["reprlib"], False),
        ("anything.at.all", ["*"], True),
        ("a", [], False),
    ],
)
def test_patterns_match_by_part(module: str, patterns: list[str], authorized: bool) -> None:
    assert is_authorized(module, patterns) is authorized
    assert check_import_authorized(module, patterns) is authorized


def test_refusal_has_the_words_of_smolagents() -> None:
    local = LocalPythonExecutor(["math"])
    local.send_tools({})
    with pytest.raises(InterpreterError) as caught:
        local("import socket")
    assert refusal("socket", local.authorized_imports) in str(caught.value)


@pytest.mark.parametrize("pattern", ["numpy", "os.path", "numpy.*", "a.b.*", "*", "_x", "été"])
def test_good_patterns_are_accepted(pattern: str) -> None:
    validate_pattern(pattern)


@pytest.mark.parametrize(
    "pattern", ["", ".", "a.", ".a", "a..b", "*.a", "a.*.b", "a*", "**", "1a", "a b", "a-b", "a\n", "a;b", "a" * 300]
)
def test_bad_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="not an import pattern"):
        validate_pattern(pattern)


def test_denied_imports_are_found_wherever_they_stand() -> None:
    source = """
import math, os
def f():
    from socket import socket
    class C:
        try:
            import subprocess as s
        except ImportError:
            from . import x
for i in ():
    from ..up import y
match 1:
    case 1: import shutil
from __future__ import annotations
"""
    assert find_denied(ast.parse(source), ["math"]) == [
        (2, "os"),
        (4, "socket"),
        (7, "subprocess"),
        (9, "."),
        (11, "..up"),
        (13, "shutil"),
    ]


def test_refusal_of_a_relative_import_says_why() -> None:
    text = refusal(".x", ["math"])
    assert text.startswith("Import of .x is not allowed: the program is in no package")


def test_import_at_run_time_follows_the_patterns_of_now() -> None:
    patterns = ["math"]
    agent_import = make_import(lambda: patterns)
    with pytest.raises(
        ImportDenied, match=r"^Import of json is not allowed. Authorized imports are: \['math'\]$"
    ) as caught:
        agent_import("json")
    assert (caught.value.module, caught.value.name) == ("json", "json")
    patterns.append("json")
    assert agent_import("json").__name__ == "json"
    with pytest.raises(ImportDenied):
        agent_import("x", {"__package__": "json"}, None, ("y",), 1)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    """An agent with importlib guarded; math, json and importlib are authorized."""
    for name in ("import_module", "__import__", "reload"):
        monkeypatch.setattr(importlib, name, getattr(importlib, name))
    agent = Agent(authorized=["math", "json", "importlib", "email"])
    guard_importlib(agent.builtins, lambda: agent.authorized)
    return agent


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os')",
        "import importlib\nimportlib.import_module('os')",
        "import importlib\nimportlib.import_module('.handlers', 'logging')",
        "import importlib\nimportlib.__import__('os')",
        "from importlib import import_module\n(lambda: import_module('os'))()",
        "import importlib, json\nimportlib.reload(json.codecs)",
        "exec('import os')",
        "exec('import os', {})",
        "exec('import os', {'__builtins__': __import__('json').__builtins__})",
        "eval('__import__(\"os\")', {'__builtins__': {}})",
        "ns = {}\nexec('def f():\\n return __import__(\"os\")', ns)\nns['f']()",
        "c = compile('import ' + 'os', 'f', 'exec')",
        "import importlib\nexec('il.import_module(\"os\")', {'il': importlib})",
        "class C:\n    __import__('os')",
    ],
)
def test_agent_cannot_import_what_is_not_authorized(agent: Agent, source: str) -> None:
    assert isinstance(agent.run(source).error, ImportDenied)


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\nimportlib.import_module('math').pi",
        "import json\njson.dumps([1])",
        "from email import message_from_string\nmessage_from_string('a: b')['a']",
        "import importlib, json\nimportlib.reload(json)",
        "exec('import math')",
    ],
)
def test_agent_can_import_what_is_authorized(agent: Agent, source: str) -> None:
    assert agent.run(source).error is None


def test_libraries_import_what_they_like(agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "some_library.py").write_text(
        "import importlib\nimport colorsys\ndef lazy(): return importlib.import_module('wave' if 0 else 'colorsys')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    agent.authorized.append("some_library")
    assert agent.run("import some_library\nsome_library.lazy().__name__").value == "colorsys"
    monkeypatch.delitem(sys.modules, "some_library")
