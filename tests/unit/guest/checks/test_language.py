"""The language rules: strict refuses each program by its rule, and ordinary programs of agents run as before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import cloudpickle
import pytest
from smolagents.local_python_executor import InterpreterError, LocalPythonExecutor

from executor_server.guest.checks.checker import check
from executor_server.guest.checks.instrumentation import LAST_STATEMENT, TRAILING_EXPRESSION
from executor_server.guest.checks.language import LISTED_BUILTINS, PolicyDenied, explanation
from executor_server.guest.checks.rules import LANGUAGE_RULES, Rules
from executor_server.guest.wire.messages import ErrorDetail
from executor_server.policy.profile import LanguageTable
from tests.support.agent_program import SENTINELS, Agent
from tests.support.language_corpus import BASE, MORE_PYTHON, ORDINARY, REFUSED


def _strict(imports: Iterable[str] = ()) -> Agent:
    return Agent((*BASE, *imports), refused=sorted(LANGUAGE_RULES))


def _refusal(agent: Agent, source: str) -> str:
    """Returns the message of the refusal, in the source or at run time; empty when there is none."""
    verdict = check(
        source, "<execution-1>", rules=agent.enforcer.rules, output_mode=TRAILING_EXPRESSION, sentinels=SENTINELS
    )
    if verdict.error is not None:
        assert verdict.outcome == "policy_denied", verdict.error
        return str(verdict.error.message)
    ended = agent.run(source)
    refusal = agent.enforcer.refusal
    assert refusal is not None or ended.error is None, ended.error
    return str(refusal or "")


def test_rules_are_those_of_the_policy() -> None:
    assert LanguageTable.model_fields.keys() - {"preset"} == set(LANGUAGE_RULES)


@pytest.mark.parametrize("name", REFUSED)
def test_strict_refuses(name: str) -> None:
    program = REFUSED[name]
    message = _refusal(_strict(program.imports), program.source)
    assert f"(language.{program.rule})" in message, message
    assert " is not allowed: " in message


@pytest.mark.parametrize("name", [name for name, program in REFUSED.items() if program.rule != "dangerous_functions"])
def test_another_rule_does_not_refuse_it(name: str) -> None:
    """Each rule is a switch of its own: with all but the program's rule in force, that rule refuses nothing."""
    program = REFUSED[name]
    agent = Agent(("*",), refused=sorted(set(LANGUAGE_RULES) - {program.rule}))
    try:
        message = _refusal(agent, program.source)
    except AssertionError:
        return  # not refused, it failed by itself
    assert f"(language.{program.rule})" not in message


@pytest.mark.parametrize("name", [name for name, program in REFUSED.items() if program.smolagents_too])
def test_what_strict_refuses_here_smolagents_refuses_too(name: str) -> None:
    program = REFUSED[name]
    local = LocalPythonExecutor(list(program.imports))
    local.send_tools({})
    with pytest.raises(InterpreterError):
        local(program.source)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_programs_have_the_value_that_the_local_executor_gives(name: str) -> None:
    local = LocalPythonExecutor([])
    local.send_tools({})
    expected = local(ORDINARY[name]).output
    ended = _strict().run(ORDINARY[name], output_mode=LAST_STATEMENT)
    assert ended.error is None
    assert ended.value == expected


@pytest.mark.parametrize("name", MORE_PYTHON)
def test_strict_is_still_python(name: str) -> None:
    source, value = MORE_PYTHON[name]
    ended = _strict().run(source)
    assert ended.error is None
    assert ended.value == value


def test_refusal_says_what_and_where_and_by_which_rule() -> None:
    rules = Rules(["*"], refused=["dunder_access"])
    source = "x = 1\nif x:\n    y = x.__class__\n"
    verdict = check(source, "<execution-1>", rules=rules, output_mode=TRAILING_EXPRESSION, sentinels=SENTINELS)
    message = explanation("dunder_access", "Attribute __class__")
    assert verdict.outcome == "policy_denied"
    assert verdict.error == ErrorDetail(
        type="PolicyDenied",
        message=message,
        line=3,
        traceback=f'  File "<execution-1>", line 3\n    y = x.__class__\nPolicyDenied: {message}\n',
        statement="if x:\n    y = x.__class__",
    )
    assert message.startswith("Attribute __class__ is not allowed: names of the form __x__ are refused (language.")


def test_of_several_refusals_the_first_line_counts() -> None:
    rules = Rules(["math"], refused=["dunder_access"])

    def verdict(source: str) -> tuple[str, int]:
        seen = check(source, "f", rules=rules, output_mode=TRAILING_EXPRESSION, sentinels=SENTINELS)
        assert seen.error is not None
        return seen.outcome, seen.error.line

    assert verdict("x.__dict__\nimport os") == ("policy_denied", 1)
    assert verdict("import os\nx.__dict__") == ("import_denied", 1)


def test_builtins_come_back_when_the_rules_change() -> None:
    agent = _strict()
    agent.run("def f():\n    return eval('1 + 1')")
    assert isinstance(agent.run("f()").error, PolicyDenied)
    agent.hold_to(Rules(["*"]))
    assert agent.run("f()").value == 2
    agent.hold_to(Rules(["*"], refused=["dynamic_code"]))
    assert isinstance(agent.run("f()").error, PolicyDenied)


def test_what_a_rule_does_not_need_is_not_rewritten() -> None:
    source = "import random\nx = [random.random() for i in range(9)]\nx[0]\n'{}'.format(1)\nx.sort()"
    codes = {
        refused: check(
            source, "f", rules=Rules(["*"], refused=refused), output_mode=TRAILING_EXPRESSION, sentinels=SENTINELS
        ).code
        for refused in [(), ("open",), ("file_writing", "dynamic_code", "unlisted_builtins"), ("module_attributes",)]
    }
    plain = codes[()]
    assert codes["open",] == codes["file_writing", "dynamic_code", "unlisted_builtins"] == plain
    assert codes["module_attributes",] != plain


def test_every_listed_builtin_is_there_in_strict() -> None:
    names = sorted(LISTED_BUILTINS)
    assert _strict().run(f"[callable(each) for each in ({', '.join(names)})]").value == [True] * len(names)


def test_hooked_function_shipped_by_cloudpickle_works_without_hooks() -> None:
    agent = _strict()
    agent.run("import random\ndef f(x):\n    '{}'.format(1)\n    return x.upper()[0] + getattr(x, 'lower')()[1]")
    shipped: Any = cloudpickle.loads(cloudpickle.dumps(agent.namespace["f"]))
    assert shipped("ab") == "Ab"


def test_deep_and_wide_sources_are_rewritten_without_recursion() -> None:
    agent = _strict()
    assert agent.run("x = 1\n" + "x.real" + ".real" * 150).value == 1
    assert agent.run("y = [" + "x.real, " * 20_000 + "]\nlen(y)").value == 20_000


def test_types_without_end_do_not_fill_the_interpreter() -> None:
    agent = _strict()
    agent.run("for i in range(9000):\n    type('C', (), {'a': 1})().a", budget=100_000)
    assert len(agent.hooks._plain) <= 4096 + 64
