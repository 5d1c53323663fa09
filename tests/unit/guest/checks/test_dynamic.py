from __future__ import annotations

import ast
import os
import sys

import pytest

from executor_server.guest.checks.imports import ImportDenied
from tests.support.agent_program import Agent, run


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("x = 1\nexec('x += 1')\nx", 2),
        ("def f():\n    y = 3\n    return eval('y * 2')\nf()", 6),
        ("def f(a):\n    exec('b = a')\n    return 'b' in locals()\nf(1), eval('1', {}, {})", None),
        ("g, l = {'a': 1}, {'b': 2}\neval('a + b', g, l)", 3),
        ("g, l = {}, {}\nexec('z = 1', g, l)\n'z' in g, l", (False, {"z": 1})),
        ("x = 5\nlc = {'x': 6}\neval('x', None, lc)", 6),
        ("class C:\n    v = 2\n    w = eval('v + 1')\n    exec('u = 4')\nC.w, C.u", (3, 4)),
        (
            "import array\neval(' \\t1 + 1'), eval(b'2'), eval(bytearray(b' 3')), eval(array.array('b', b'4'))",
            (2, 2, 3, 4),
        ),
        ("eval(compile('1 + 1', 'f', 'eval'))", 2),
        ("exec(compile('q = 7', 'f', 'exec'))\nq", 7),
        ("def f(): return 9\neval(f.__code__)", 9),
        ("[eval('i', {'i': i}) for i in range(3)]", [0, 1, 2]),
        ("list(map(eval, ['1', '2']))", [1, 2]),
    ],
)
def test_exec_and_eval_behave_as_in_cpython(source: str, value: object) -> None:
    plain: dict[str, object] = {}
    *body, tail = ast.parse(source).body
    exec(compile(ast.Module(body, []), "f", "exec"), plain)
    assert isinstance(tail, ast.Expr)
    expected = eval(compile(ast.Expression(tail.value), "f", "eval"), plain)
    ended = run(source)
    assert ended.error is None
    assert ended.value == expected
    assert value is None or expected == value


@pytest.mark.parametrize(
    "call",
    [
        "exec(1)",
        "eval([])",
        "exec('x', 1)",
        "exec('x', {}, 1)",
        "eval('x y')",
        "eval('')",
        "compile('x', 'f', 'nope')",
        "compile('x', 'f', 'exec', flags=-1)",
        "compile('\\0', 'f', 'exec')",
        "exec('1', closure=1)",
    ],
)
def test_mistakes_raise_what_cpython_raises(call: str) -> None:
    with pytest.raises(Exception) as expected:
        eval(call)
    error = run(call).error
    assert (type(error), str(error)) == (expected.type, str(expected.value))


def test_compile_can_still_make_a_tree() -> None:
    ended = run("import ast\ncompile('1', 'f', 'eval', ast.PyCF_ONLY_AST)")
    assert isinstance(ended.value, ast.Expression)


def test_compiling_a_tree_leaves_it_as_it_was() -> None:
    source = "import ast\nt = ast.parse('for i in range(2): pass')\nb = ast.dump(t)\nexec(compile(t, 'f', 'exec'))\nast.dump(t) == b"
    assert run(source).value is True


def test_compile_inherits_future_flags_of_its_caller() -> None:
    source = "from __future__ import annotations\nns = {}\nexec('def f(x: [i for i in y]): pass', ns)\nns['f'].__annotations__"
    assert run(source).value == {"x": "[i for i in y]"}


def test_single_mode_shows_values(capsys: pytest.CaptureFixture[str]) -> None:
    run("exec(compile('40 + 2', 'f', 'single'))")
    assert capsys.readouterr().out == "42\n"


def test_refused_import_in_a_string_is_no_missing_module() -> None:
    agent = Agent(authorized=["math"])
    assert isinstance(agent.run("try:\n    exec('import os')\nexcept ImportError:\n    pass").error, ImportDenied)


@pytest.mark.parametrize(("name", "kind"), [("input", EOFError), ("breakpoint", RuntimeError)])
def test_nothing_waits_for_a_person(name: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordinary programs end their loop over input() at an EOFError; a RuntimeError ended the execution."""
    with open(os.devnull) as nothing:  # noqa: PTH123 - what a sandbox has
        monkeypatch.setattr(sys, "stdin", nothing)
        error = run(f"{name}()").error
    assert isinstance(error, kind)
    assert str(error).startswith(f"{name}() is not available in the sandbox")


def test_input_reads_what_a_program_puts_there_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", sys.stdin)  # put back at the end
    source = (
        "import io, sys\nsys.stdin = io.StringIO('ann\\n')\nsaid = [input('name? ')]\n"
        "try:\n    input()\nexcept EOFError as end:\n    said.append(str(end))\nsaid"
    )
    assert run(source).value == ["ann", "EOF when reading a line"]
    assert capsys.readouterr().out == "name? "


@pytest.mark.parametrize("name", ["exit", "quit"])
def test_exit_ends_the_program(name: str) -> None:
    error = run(f"{name}(3)").error
    assert isinstance(error, SystemExit)
    assert error.code == 3


def test_patching_builtins_does_not_weaken_the_checks() -> None:
    agent = Agent(authorized=["builtins", "ast"])
    agent.run("import builtins, ast\nbuiltins_compile = builtins.compile\nast.iter_child_nodes = lambda n: []")
    try:
        assert isinstance(agent.run("exec('if 1: import os')").error, ImportDenied)
    finally:
        agent.namespace["ast"].iter_child_nodes = _iter_child_nodes


_iter_child_nodes = ast.iter_child_nodes
