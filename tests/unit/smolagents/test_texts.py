"""The texts about failed executions that a model reads."""

from __future__ import annotations

from typing import Any

import pytest
from smolagents.local_python_executor import BASE_PYTHON_TOOLS, InterpreterError, LocalPythonExecutor
from smolagents.utils import AgentError

from executor_client import ErrorDetail, ExecutionResult, Limits, Outcome, VariablesState
from executor_client._core.failure_text import TRACEBACK_LINES_MAX
from executor_client.smolagents.failures import CodeExecutionError, Restored, describe
from executor_client.smolagents.session_request import PRELUDE

LIMITS = Limits(memory_bytes=2**20)


def failure(outcome: Outcome, *, state: VariablesState = VariablesState.KEPT, **error: Any) -> ExecutionResult:
    detail = ErrorDetail(**{"type": "", "message": "", **error}) if error else None
    return ExecutionResult(execution_id="e", outcome=outcome, state=state, generation=1, error=detail)


def text_of(result: ExecutionResult, code: str = "", restored: tuple[str, ...] = ()) -> str:
    return describe(result, code, LIMITS, Restored(restored))


def local_text(code: str) -> str:
    executor = LocalPythonExecutor([])
    executor.send_tools({})
    with pytest.raises(InterpreterError) as raised:
        executor(code)
    return str(raised.value)


def test_a_failure_begins_as_the_local_executor_says_it() -> None:
    result = failure(Outcome.EXCEPTION, type="ValueError", message="bad", line=1, statement="raise ValueError('bad')")
    assert text_of(result).splitlines()[0] == local_text("raise ValueError('bad')")


def test_a_refused_import_reads_as_in_the_local_executor() -> None:
    message = "Import of os is not allowed. Authorized imports are: ['math']"
    first = text_of(failure(Outcome.IMPORT_DENIED, type="ImportDenied", message=message, line=2), "x = 1\nimport os")
    assert first.splitlines()[0] == f"Code execution failed at line 'import os' due to: InterpreterError: {message}"


def test_a_syntax_error_shows_the_line_and_the_caret() -> None:
    traceback = '  File "<execution-1>", line 1\n    x = = 1\n        ^\nSyntaxError: invalid syntax'
    result = failure(Outcome.EXCEPTION, type="SyntaxError", message="invalid syntax", line=1, traceback=traceback)
    text = text_of(result, "x = = 1")
    assert text.startswith(
        "Code parsing failed on line 1 due to: SyntaxError: invalid syntax\n    x = = 1\n        ^\n"
    )


def test_a_syntax_error_that_the_code_raised_is_no_parse_error() -> None:
    traceback = 'Traceback (most recent call last):\n  File "<execution-1>", line 1, in <module>\nSyntaxError: bad'
    result = failure(Outcome.EXCEPTION, type="SyntaxError", message="bad", traceback=traceback, statement="exec(x)")
    assert text_of(result).startswith("Code execution failed at line 'exec(x)' due to: SyntaxError: bad\n")


@pytest.mark.parametrize(
    ("outcome", "said"),
    [
        (Outcome.TIMEOUT, "Code execution exceeded the maximum execution time"),
        (Outcome.CPU_LIMIT, "exceeded the maximum CPU time"),
        (Outcome.OPERATION_LIMIT, "Reached the max number of operations"),
        (Outcome.POLICY_DENIED, "the policy refuses it"),
        (Outcome.OUT_OF_MEMORY, "ran out of memory: at most 1048576 bytes can be used"),
        (Outcome.OUTPUT_LIMIT, "far more than is kept"),
        (Outcome.EXITED, "ended its own interpreter"),
        (Outcome.CANCELLED, "was cancelled"),
        (Outcome.CRASHED, "the interpreter crashed"),
        (Outcome.LOST, "the sandbox is gone"),
    ],
)
def test_each_outcome_says_what_happened(outcome: Outcome, said: str) -> None:
    assert said in text_of(failure(outcome)).splitlines()[0]


@pytest.mark.parametrize(
    "outcome",
    [Outcome.TIMEOUT, Outcome.CPU_LIMIT, Outcome.OPERATION_LIMIT, Outcome.OUTPUT_LIMIT, Outcome.POLICY_DENIED],
)
def test_the_limit_that_held_is_the_sandboxs_to_say(outcome: Outcome) -> None:
    """An execution may have a lower limit than its session, and a session reports only its own."""
    assert text_of(failure(outcome, message="at most 7")).splitlines()[0].endswith(": at most 7")


def test_a_reset_says_what_is_lost_and_what_is_back() -> None:
    text = text_of(failure(Outcome.TIMEOUT, state=VariablesState.RESET), restored=("sales", "logo"))
    assert "are lost and must be defined again" in text
    assert text.endswith("the tools and the variables given with the task (logo, sales).")


def test_a_traceback_has_no_colours_no_repetition_and_an_end() -> None:
    frames = "".join(f'  File "<execution-1>", line {n}, in f\n    f()\n' for n in range(500))
    traceback = f"Traceback (most recent call last):\n{frames}\x1b[1;35mRecursionError\x1b[0m: too deep"
    text = text_of(failure(Outcome.EXCEPTION, type="RecursionError", message="too deep", traceback=traceback))
    assert "\x1b" not in text
    assert text.count("RecursionError: too deep") == 1
    assert len(text.splitlines()) <= TRACEBACK_LINES_MAX + 4


def test_the_error_is_what_both_kinds_of_executor_raise() -> None:
    error = CodeExecutionError("said", Outcome.TIMEOUT)
    assert isinstance(error, AgentError) and isinstance(error, InterpreterError)
    assert str(error) == error.message == "said"


def test_the_prelude_offers_what_the_local_executor_has_beyond_builtins() -> None:
    names = {name.strip() for name in PRELUDE.partition("import ")[2].split(",")}
    assert names == {name for name in BASE_PYTHON_TOOLS if name not in __builtins__}  # type: ignore[operator]
