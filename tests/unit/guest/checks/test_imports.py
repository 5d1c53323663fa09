from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smolagents.local_python_executor import InterpreterError, LocalPythonExecutor, check_import_authorized

from executor_server.guest.checks.imports import ImportDenied, Imports, refusal
from executor_server.guest.checks.own_modules import NoModules
from executor_server.guest.checks.rules import Rules
from executor_server.guest.wire.messages import MAX_IMPORTS
from tests.support.agent_program import Agent

_PARTS = st.sampled_from(["a", "b", "ab", "*"])
_PATTERNS = st.lists(st.lists(_PARTS, min_size=1, max_size=4).map(".".join), max_size=4)


@given(st.lists(_PARTS, min_size=1, max_size=4).map(".".join), _PATTERNS)
def test_rules_are_those_of_smolagents(module: str, patterns: list[str]) -> None:
    assert Rules(patterns).authorizes(module) == check_import_authorized(module, patterns)


def test_refusal_has_the_words_of_smolagents() -> None:
    local = LocalPythonExecutor(["math"])
    local.send_tools({})
    with pytest.raises(InterpreterError) as caught:
        local("import socket")
    assert refusal("socket", Rules(local.authorized_imports)) in str(caught.value)


@pytest.mark.parametrize(
    ("module", "denied", "refused"),
    [
        ("os", ["os"], True),
        ("os.path", ["os"], True),
        ("os", ["os.path"], False),
        ("os.path", ["os.path"], True),
        ("a.b.c", ["a.b"], True),
        ("a", ["a.*"], True),
        ("a.b", ["a.*"], True),
        ("ab", ["a"], False),
        ("anything", ["*"], True),
    ],
)
def test_a_denied_module_is_denied_with_all_below_it(module: str, denied: list[str], refused: bool) -> None:
    rules = Rules(["*", module], denied)
    assert (rules.denies(module), rules.authorizes(module)) == (refused, not refused)


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
    imports = Imports(ast.parse(source), Rules(["math"]), NoModules())
    assert imports.denied == [
        (2, "os"),
        (4, "socket"),
        (7, "subprocess"),
        (9, "."),
        (11, "..up"),
        (13, "shutil"),
    ]


def test_from_imports_of_denied_modules_are_denied() -> None:
    rules = Rules(["*"], ["os.path", "xml.dom.*"])
    source = (
        "from os import path\nfrom os import sep\nfrom os import *\nfrom xml import sax, dom\nimport xml.dom.minidom"
    )
    assert Imports(ast.parse(source), rules, NoModules()).denied == [
        (1, "os.path"),
        (3, "os.path"),
        (4, "xml.dom"),
        (5, "xml.dom.minidom"),
    ]


def test_refusal_of_a_relative_import_says_why() -> None:
    text = refusal(".x", Rules(["math"]))
    assert text.startswith("Import of .x is not allowed: relative imports need a package")


def test_refusal_is_short_whatever_was_asked_for_and_is_authorized() -> None:
    """The daemon refuses a longer message as a violation of the protocol."""
    text = refusal("a" * 10**6, Rules([f"module_{n}." + "x" * 180 for n in range(256)]))
    assert len(text) < 5000
    assert text.endswith("…] (256 in all)")


def test_reported_imports_are_sorted_and_bounded() -> None:
    def reported(source: str) -> list[str]:
        return Imports(ast.parse(source), Rules(["*"]), NoModules()).reported

    assert reported("import b, a.c\nfrom a import x\nfrom . import y\ndef f():\n    import b") == [".", "a", "a.c", "b"]
    assert reported("\n".join(f"import m{n:05}" for n in range(10_000))) == [f"m{n:05}" for n in range(MAX_IMPORTS)]
    assert reported(f"import {'x' * 201}, {'y' * 200}") == ["y" * 200]
    assert sum(map(len, reported("\n".join(f"import {'é' * 100}{n}" for n in range(64))))) <= 4096 / 2 + 64


@pytest.fixture
def agent() -> Agent:
    """Runs programs for which math, json and email are authorized."""
    return Agent(authorized=["math", "json", "email", "builtins"])


@pytest.mark.parametrize(
    "source",
    [
        "__import__('os')",
        "exec('import os')",
        "exec('import os', {})",
        "exec('import os', {'__builtins__': __import__('json').__builtins__})",
        "eval('__import__(\"os\")', {'__builtins__': {}})",
        "ns = {}\nexec('def f():\\n return __import__(\"os\")', ns)\nns['f']()",
        "c = compile('import ' + 'os', 'f', 'exec')",
        "class C:\n    __import__('os')",
        "import builtins\nbuiltins.__import__('os')",
        "import builtins\nbuiltins.__import__('os', globals(), globals(), [])",
        "import builtins\nbuiltins.exec('import os')",
        "class S(str):\n    def split(self, *a): return ['math']\n__import__(S('os'))",
    ],
)
def test_agent_cannot_import_what_is_not_authorized(agent: Agent, source: str) -> None:
    assert isinstance(agent.run(source).error, ImportDenied)


@pytest.mark.parametrize(
    "source",
    [
        "__import__('math').pi",
        "import json\njson.dumps([1])",
        "from email import message_from_string\nmessage_from_string('a: b')['a']",
        "exec('import math')",
        "import builtins\nassert builtins.len is len\nbuiltins.answer = 42\nassert answer == 42\ndel builtins.answer",
    ],
)
def test_agent_can_import_what_is_authorized(agent: Agent, source: str) -> None:
    assert agent.run(source).error is None


def test_import_at_run_time_follows_the_rules_in_force(agent: Agent) -> None:
    agent.run("def f():\n    import json\n    return json.loads('1')")
    agent.enforcer.rules = Rules(["math"])
    error = agent.run("f()").error
    assert isinstance(error, ImportDenied)
    assert str(error) == "Import of json is not allowed. Authorized imports are: ['math']"
    agent.enforcer.rules = Rules(["math", "json"])
    assert agent.run("f()").value == 1


@pytest.mark.parametrize(
    "source",
    [
        "try:\n    __import__('os')\nexcept BaseException:\n    done.append(1)",
        "import contextlib\nwith contextlib.suppress(BaseException):\n    __import__('os')\nfor i in range(9): done.append(i)",
        "import threading\nt = threading.Thread(target=__import__, args=('os',))\nt.start(); t.join()",
    ],
)
def test_a_refusal_ends_the_execution_though_it_is_swallowed(
    agent: Agent, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.enforcer.rules = Rules(["contextlib", "threading"])
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    agent.namespace["done"] = done = []  # type: ignore[var-annotated]
    agent.run(source)
    assert isinstance(agent.enforcer.refusal, ImportDenied)
    assert done == []
    assert agent.run("1").error is None


def test_libraries_import_what_they_like(agent: Agent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "some_library.py").write_text(
        "import importlib\nimport colorsys\ndef lazy(): return importlib.import_module('wave' if 0 else 'colorsys')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    agent.enforcer.rules = Rules(["some_library"])
    assert agent.run("import some_library\nsome_library.lazy().__name__").value == "colorsys"
    monkeypatch.delitem(sys.modules, "some_library")
