"""The rule foreign_modules: the accesses that it rewrites, its messages, and that only modules are refused."""

from __future__ import annotations

import multiprocessing  # noqa: F401
import pty  # noqa: F401
import sys
from types import ModuleType

import pytest
from smolagents.local_python_executor import InterpreterError, LocalPythonExecutor

from benchmarks.rows.programs import MIXED
from executor_server.guest.checks.checker import check
from executor_server.guest.checks.instrumentation import TRAILING_EXPRESSION
from executor_server.guest.checks.rules import Rules
from tests.support.agent_program import SENTINELS, Agent
from tests.support.foreign_corpus import SNIPPETS
from tests.support.language_corpus import BASE, ORDINARY

_NUMPY = (*BASE, "numpy")


def _code(source: str, authorized: tuple[str, ...], refused: tuple[str, ...]) -> bytes | None:
    rules = Rules(authorized, refused=refused)
    return check(source, "f", rules=rules, output_mode=TRAILING_EXPRESSION, sentinels=SENTINELS).code


@pytest.mark.parametrize("name", [name for name, row in SNIPPETS.items() if "helper" not in row.imports])
def test_the_local_executor_refuses_these_too(name: str) -> None:
    local = LocalPythonExecutor(list(SNIPPETS[name].imports))
    local.send_tools({})
    with pytest.raises(InterpreterError):
        local(SNIPPETS[name].source)
    assert {"pty", "multiprocessing"} <= set(sys.modules), "else they could not be reached there either"


def test_refusal_names_the_path_and_what_is_authorized() -> None:
    agent = Agent(("random", "math"), refused=("foreign_modules",))
    assert str(agent.run("import random\nrandom._os.system(':')").error) == (
        "random._os is not allowed: it leads to the module os, which is not authorized (language.foreign_modules)."
        " Authorized imports are: ['random', 'math']"
    )


@pytest.mark.parametrize(
    "source",
    [
        "class A:\n    def f(self):\n        self.time = self.x + self.items[0].y\na = A()\na.value.other",
        "for i in range(9):\n    'abc'.upper().strip()\n    '{:>{}}'.format(i, 3)",
        "import math\nimport numpy as np\nmath.pi + np.nan + math.sqrt(2)\nisinstance(1, np.float64)\nnp.ndarray",
        "rows = [{'a': 1}]\nrows[0]['a']\nlen(rows)\nx = rows.copy()\nx.append(1)",
        "df.columns, df.shape, df.groupby('a').b.sum(), df.values.tolist()",
        "def f(x: np.ndarray) -> int:\n    return x.size",
        MIXED.format(size=1),
    ],
)
def test_ordinary_accesses_are_not_rewritten(source: str) -> None:
    assert _code(source, _NUMPY, ("foreign_modules",)) == _code(source, _NUMPY, ())


def test_nothing_is_rewritten_where_everything_is_authorized() -> None:
    source = "import random\nrandom._os.system\nrandom.__dict__\nx.modules"
    assert _code(source, ("*",), ("foreign_modules",)) == _code(source, ("*",), ())
    agent = Agent(("*",), refused=("foreign_modules",))
    assert agent.run("getattr is __builtins__['getattr'], type(getattr).__name__").value == (
        True,
        "builtin_function_or_method",
    )


def test_what_is_denied_is_refused_though_everything_else_is_authorized() -> None:
    agent = Agent(("*",), denied=("os",), refused=("foreign_modules",))
    assert "random._os is not allowed" in str(agent.run("import random\nrandom._os").error)
    assert agent.run("import random\nrandom._sha512 if hasattr(random, '_sha512') else 1").error is None


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_go_on_as_without_it(name: str) -> None:
    held, free = Agent(BASE, refused=("foreign_modules",)).run(ORDINARY[name]), Agent(BASE).run(ORDINARY[name])
    assert (held.error, held.value, held.operations) == (None, free.value, free.operations)


def test_function_made_under_the_rule_is_free_of_it_when_it_is_lifted() -> None:
    agent = Agent(BASE, refused=("foreign_modules",))
    agent.run("import random\ndef f(): return random._os.sep, random.__dict__['_os'].sep")
    agent.hold_to(Rules(("*",)))
    assert agent.run("f()").value == ("/", "/")
    agent.hold_to(Rules(BASE, refused=("foreign_modules",)))
    assert "random._os is not allowed" in str(agent.run("f()").error)


class _Odd:
    """Claims to be a module and has nothing of one, as objects of cffi."""

    __class__ = property(lambda _: ModuleType)
    __module__ = "odd"

    def __init__(self) -> None:
        self.sep = "/"


class _Lazy(ModuleType):
    """Loads its parts when they are read, and fails."""

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise AttributeError("a part that is not installed")


@pytest.fixture
def odd_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("odd_lib", _Odd()),
        ("odd_lazy", _Lazy("odd_lazy")),
        ("odd_none", None),
        ("odd_spec", _spec()),
    ):
        monkeypatch.setitem(sys.modules, name, value)


def _spec() -> ModuleType:
    module = ModuleType("odd_spec")
    module.__spec__ = object()  # type: ignore[assignment]
    return module


_RULES = (("foreign_modules",), ("module_attributes",), ("foreign_modules", "module_attributes"))


@pytest.mark.parametrize("refused", _RULES)
@pytest.mark.parametrize(
    "source",
    [
        "for name, each in list(sys.modules.items()):\n    pass",
        "len([each for each in sys.modules.values()])",
        "sys.modules.get('odd_none'), sys.modules.copy().keys()",
        "sys.modules['mine'] = 1\nsys.modules.pop('mine')",
    ],
)
@pytest.mark.usefixtures("odd_modules")
def test_looking_through_the_modules_meets_no_error_over_what_is_none(source: str, refused: tuple[str, ...]) -> None:
    ended = Agent(("sys", "mine"), refused=refused).run(f"import sys\n{source}")
    assert ended.error is None


@pytest.mark.parametrize("source", ["sys.modules['odd_lib'].sep", "dict(sys.modules)['odd_lib'].sep"])
@pytest.mark.parametrize("refused", [rules for rules in _RULES if "foreign_modules" in rules])
@pytest.mark.usefixtures("odd_modules")
def test_an_object_among_the_modules_is_decided_on_by_its_name(source: str, refused: tuple[str, ...]) -> None:
    agent = Agent(("sys",), refused=refused)
    error = agent.run(f"import sys\n{source}").error
    assert "odd_lib" in str(error) and "is not allowed" in str(error)
    assert Agent(("sys", "odd_lib"), refused=refused).run(f"import sys\n{source}").value == "/"
    liar = "class Key(str):\n    __hash__ = lambda self: hash('odd_lib')\n    __eq__ = lambda self, other: other == 'odd_lib'"
    assert "is not allowed" in str(agent.run(f"import sys\n{liar}\nsys.modules[Key('sys')]").error)


@pytest.mark.parametrize("name", ["odd_lazy", "odd_spec"])
@pytest.mark.parametrize("refused", _RULES)
@pytest.mark.usefixtures("odd_modules")
def test_a_module_whose_names_cannot_be_read_is_decided_on_too(name: str, refused: tuple[str, ...]) -> None:
    for authorized in (("sys",), ("sys", name)):
        error = Agent(authorized, refused=refused).run(f"import sys\nsys.modules['{name}'].__doc__").error
        assert error is None or "is not allowed" in str(error)


@pytest.mark.parametrize("source", ["getattr(odd_lib, 'sep')", "from odd_lib import sep\nsep", "odd_lib.sep"])
@pytest.mark.parametrize("refused", _RULES)
@pytest.mark.usefixtures("odd_modules")
def test_an_authorized_object_among_the_modules_is_used_like_one(source: str, refused: tuple[str, ...]) -> None:
    assert Agent(("odd_lib",), refused=refused).run(f"import odd_lib\n{source}").value == "/"
