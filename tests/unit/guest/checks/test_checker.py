from __future__ import annotations

import ast
import inspect
import json
import marshal
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.checks.checker import MAX_STATEMENT_CHARS, Verdict, check
from executor_server.guest.checks.instrumentation import TRAILING_EXPRESSION
from executor_server.guest.checks.magics import translate
from executor_server.guest.checks.rules import Rules
from executor_server.guest.checks.sentinels import Sentinels
from executor_server.guest.wire.messages import ErrorDetail

MAX_ERROR_BYTES = 16_384


def _check(source: str, *authorized: str) -> Verdict:
    return check(
        source,
        "<execution-1>",
        rules=Rules(authorized),
        output_mode=TRAILING_EXPRESSION,
        sentinels=Sentinels("5f3c"),
    )


def test_good_source_gives_code_and_the_lines_of_its_statements() -> None:
    verdict = _check("x = 1\n\n@d\n@e\ndef f():\n    pass\ny = (1,\n 2); z = 3\n")
    assert verdict.code is not None
    code, spans, names = marshal.loads(verdict.code)
    assert code.co_filename == "<execution-1>"
    assert (spans, names) == ([[1, 1], [3, 6], [7, 8], [8, 8]], [])
    assert (verdict.error, verdict.outcome) == (None, "") and not code.co_flags & inspect.CO_COROUTINE


@pytest.mark.parametrize(
    "source", ["await f()", "async for x in y: pass", "async with x: pass", "[x async for x in y]"]
)
def test_top_level_await_makes_it_async(source: str) -> None:
    packed = _check(source).code
    assert packed is not None and marshal.loads(packed)[0].co_flags & inspect.CO_COROUTINE


@pytest.mark.parametrize(
    ("source", "is_async", "names"),
    [
        ("asyncio.gather(f())", True, []),
        ("from asyncio import gather\ngather(f())", True, []),
        ("from asyncio import *\ngather(f())", True, []),
        ("gather(f())", True, ["gather"]),
        ("gather(await f())", True, []),
        ("def gather(*a): pass\ngather(f())", False, []),
        ("from mine import gather\ngather(f())", False, []),
        ("from asyncio import gather\ngather = print\ngather(f())", True, []),
        ("try:\n    from asyncio import gather\nexcept ImportError:\n    gather = None\ngather(f())", True, []),
        ("def run(): pass\nasyncio.create_task(run())", True, []),
        ("from asyncio import run\nrun(gather(f()))", False, []),
        ("def f():\n    gather()", False, []),
    ],
)
def test_a_program_runs_in_a_loop_if_it_calls_what_needs_one(source: str, is_async: bool, names: list[str]) -> None:
    """Any function named gather counted as asyncio's: the program's own failed if it ran a loop itself."""
    packed = _check(source, "*").code
    assert packed is not None
    code, _, decide = marshal.loads(packed)
    assert (bool(code.co_flags & inspect.CO_COROUTINE), decide) == (is_async, names)


def test_syntax_error_reads_as_in_python() -> None:
    error = _check("x = 1\ny = = 2\n").error
    assert error == ErrorDetail(
        type="SyntaxError",
        message="invalid syntax",
        line=2,
        traceback='  File "<execution-1>", line 2\n    y = = 2\n        ^\nSyntaxError: invalid syntax\n',
        statement="y = = 2",
    )


@pytest.mark.parametrize(
    ("source", "kind", "line"),
    [
        ("if 1:\nx", "IndentationError", 2),
        ("if 1:\n\tx\n        y", "TabError", 3),
        ("x\nreturn 1", "SyntaxError", 2),
        ("x\nnonlocal y", "SyntaxError", 2),
        ("def f(a, a): pass", "SyntaxError", 1),
        ("x\nfrom __future__ import braces", "SyntaxError", 2),
        ("f'{'", "SyntaxError", 1),
        ("def f():\n  x = 1\n  global x", "SyntaxError", 3),
        ("break", "SyntaxError", 1),
    ],
)
def test_errors_of_parser_and_compiler_have_their_line(source: str, kind: str, line: int) -> None:
    error = _check(source).error
    assert error is not None
    assert (error.type, error.line) == (kind, line)
    assert error.traceback.endswith(f"{kind}: {error.message}\n")
    assert error.statement in source.split("\n")[line - 1]


@pytest.mark.parametrize(
    ("line", "command", "packages"),
    [
        ("!pip install polars", "!pip install", ["polars"]),
        (
            "%pip install -q -r all.txt 'scikit-learn>=1.5' pandas  # both",
            "%pip install",
            ["scikit-learn>=1.5", "pandas"],
        ),
        ("    !python3 -m pip install a[b]==1.2", "!python3 -m pip install", ["a[b]==1.2"]),
        ("pip install requests", "pip install", ["requests"]),
        ("!{sys.executable} -m pip install x", "!{sys.executable} -m pip install", ["x"]),
        ("!uv pip install x git+https://host/y", "!uv pip install", ["x"]),
        ("%conda install -c conda-forge rdkit", "%conda install", ["rdkit"]),
    ],
)
def test_a_line_that_installs_packages_is_answered_with_what_to_do(
    line: str, command: str, packages: list[str]
) -> None:
    error = _check(f"x = 1\n{'if x:' if line[0] == ' ' else 'y = 2'}\n{line}\nimport math\n").error
    assert error is not None
    named = ", ".join(f'"{each}"' for each in packages)
    assert error.message == (
        f"'{command}' is not Python. Import the module: it may be installed already. "
        f"If it is not, create the session with packages=[{named}]"
    )
    assert (error.type, error.line, error.statement) == ("SyntaxError", 3, line.strip())
    assert error.traceback.endswith(f"SyntaxError: {error.message}\n")


@pytest.mark.parametrize("line", ["pip installed x", "x = pip install y", "what is this?", "x = (!ls)"])
def test_other_lines_that_are_no_python_are_answered_as_python_does(line: str) -> None:
    error = _check(f"{line}\n").error
    assert error is not None and error.message == "invalid syntax"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "%%capture",
            "%%capture is an IPython magic, which is not available here: leave the line out. Available: !COMMAND",
        ),
        ("%foo bar", "%foo is an IPython magic, which is not available here: write Python. Available: !COMMAND"),
        ("x = 1\n%%bash\necho it's", "%%bash applies to a whole step: write it as the first line"),
        ("%time x = = 1", "invalid syntax"),
    ],
)
def test_a_magic_that_is_not_translated_is_answered_with_what_to_write(source: str, says: str) -> None:
    error = _check(f"{source}\n# don't\n").error
    assert error is not None and error.message.startswith(says)
    assert source.split("\n")[error.line - 1] == error.statement and "get_ipython" not in error.traceback


@pytest.mark.parametrize(
    "source",
    [
        's = """\n!ls\n%time\nx?\n"""',
        "s = '''\n!ls '\n\\'''\n%time\n'''",
        "s = 'a\\\n!ls'",
        "x = (5\n% 3)",
        "x = 5 \\\n% 3",
        "x = [  # it's (\n1\n]",
        "x = f'{y[\"a\"]}'  # '''",
        "x = {'a': (1,\n 2)}",
    ],
)
def test_python_between_magics_stays_as_it_is(source: str) -> None:
    python, changed = translate(f"!a\n{source}\n%time f()\nif x:\n\t!b\n", "f")
    lines = source.count("\n") + 1
    assert changed == {1, lines + 2, lines + 4}
    assert python.split("\n")[1 : lines + 1] == source.split("\n")
    ast.parse(python)


def test_many_magics_take_few_passes() -> None:
    started_s = time.monotonic()
    for source in (
        "!x\n" * 20_000,
        "%time x\n" * 5_000,
        "!x\\\n" * 20_000,
        "!x\n" + "x='" * 100_000,
        "!x\nx = (5\n" + "% 3\n" * 20_000,
        "%%bash\n" + "(" * 10**6,
    ):
        _check(source)
    assert time.monotonic() - started_s < 30


def test_a_hostile_line_that_installs_is_answered_shortly() -> None:
    started_s = time.monotonic()
    for source in (
        "!pip install " + "a " * 500_000,
        "!" + " " * 500_000 + "pip install",
        "!pip install " + "-" * 10**6,
    ):
        error = _check(source).error
        assert error is not None and len(error.message) < 1_000
    assert time.monotonic() - started_s < 5


def test_refused_import_names_module_line_and_what_is_authorized() -> None:
    verdict = _check("import math\nif x:\n    y = 1\n    import socket, os\n", "math", "json")
    assert verdict.outcome == "import_denied"
    message = "Import of os is not allowed. Authorized imports are: ['math', 'json']"
    assert verdict.error == ErrorDetail(
        type="ImportDenied",
        message=message,
        line=4,
        traceback=f'  File "<execution-1>", line 4\n    import socket, os\nImportDenied: {message}\n',
        statement="if x:\n    y = 1\n    import socket, os",
    )
    assert verdict.imports == ["math", "os", "socket"]


HOSTILE = {
    "nul": "a\0b",
    "lone surrogate": "x = 1\ny = '\ud800'",
    "surrogate in a name": "\udcff = 1",
    "open brackets": "(" * 2**17,
    "brackets": "[" * 100_000 + "]" * 100_000,
    "unary": "-" * 2**18 + "1",
    "not": "not " * 100_000 + "1",
    "attributes": "a" + ".a" * 100_000,
    "calls": "f" + "()" * 100_000,
    "sum": "1" + "+1" * 100_000,
    "power": "1" + "**1" * 100_000,
    "lambdas": "lambda:" * 50_000 + "1",
    "conditionals": "1 if 1 else " * 50_000 + "1",
    "indentation": "".join(" " * depth + "if 1:\n" for depth in range(200)),
    "nested blocks": "".join(" " * depth + "for x in y:\n" for depth in range(50)) + " " * 50 + "pass",
    "elif": "if 1: pass\n" + "elif 1: pass\n" * 20_000,
    "big integer": "9" * 10_000,
    "f-string": "f'" + "{f'" * 200,
    "long string": "'" + "x" * 1_000_000,
    "carriage returns": "x = 1\r\r\ny = = 2\r",
    "form feed": "\f\fx =\f= 1",
    "cookie": "# coding: rot13\nk = 1 2",
    "unknown cookie": "# coding: nonsense\nx = 1",
    "bom": "\ufeffx = 1 1",
    "too late future": "x = 1\nfrom __future__ import annotations",
    "bidirectional": "x = '\u202e' 1",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_source_gets_a_bounded_verdict(name: str) -> None:
    verdict = _check(HOSTILE[name])
    assert (verdict.code is None) != (verdict.error is None)
    if verdict.error is not None:
        assert verdict.error.type in {"SyntaxError", "IndentationError", "TabError"}
        assert 1 <= verdict.error.line <= HOSTILE[name].count("\n") + 1 + HOSTILE[name].count("\r")
        assert len(json.dumps(verdict.error.head(), ensure_ascii=False).encode()) <= MAX_ERROR_BYTES


PIECES = ["x = 1", "if x:", "  y", "lambda:", "import os", "f'", ":=", *"()[]'{}\\#\n\t\0\ud800é*@"]


@given(st.lists(st.sampled_from(PIECES)))
def test_any_text_gets_a_verdict(pieces: list[str]) -> None:
    verdict = _check("".join(pieces))
    assert (verdict.code is None) != (verdict.error is None)
    if verdict.error is not None:
        "".join(map(str, verdict.error.head().values())).encode()


def test_caret_of_a_long_line_stays_under_its_place() -> None:
    error = _check("x = 1; " * 50_000 + "y = = 1; " + "z = 2; " * 1000).error
    assert error is not None
    shown, caret = error.traceback.split("\n")[1:3]
    assert shown[caret.index("^")] == "="
    assert len(error.statement) <= MAX_STATEMENT_CHARS


def test_warnings_about_the_source_stay_here() -> None:
    """Warnings are errors in the tests: the sentinels' own, "not callable", and the program's."""
    assert _check("x = '\\d'\nx is 1\nfor i in 'a': pass\nassert (x, 'y')").code is not None


def test_same_source_gives_the_same_code() -> None:
    codes = [_check("def f(x): return [i for i in x]\nf('a')").code for _ in range(3)]
    assert all(a == b for a, b in pairwise(codes))
