"""The executor's handling of warnings and refusals of a daemon."""

from __future__ import annotations

import io
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console
from smolagents import tool
from smolagents.local_python_executor import InterpreterError
from smolagents.monitoring import AgentLogger

from examples.scripted import Reply, ScriptedModel
from executor_api.v1 import types_pb2 as types
from executor_client import (
    EnvironmentFailed,
    InvalidRequest,
    Limits,
    ModulesMissing,
    OpaqueValue,
    Outcome,
    PolicyViolationError,
    ResourceExhaustedError,
)
from executor_client.smolagents import (
    CodeAgent,
    CodeExecutionError,
    DaemonLost,
    RemoteExecutor,
    RemotePythonInterpreterTool,
)
from tests.support.fake_daemon import TOKEN, FakeDaemon, Refusal, busy, result, serve


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    with tempfile.TemporaryDirectory(prefix="fake") as directory, serve(Path(directory)) as daemon:
        yield daemon


@pytest.fixture
def shown() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def executor(daemon: FakeDaemon, shown: io.StringIO) -> Iterator[RemoteExecutor]:
    logger = AgentLogger(console=Console(file=shown, width=200))
    with RemoteExecutor(logger=logger, address=daemon.address, token=TOKEN) as ready:
        yield ready


def warning(limit: str) -> types.Event:
    return types.Event(limit_warning=types.LimitWarningEvent(limit=limit, used=8_000, budget=10_000))


@pytest.mark.parametrize(
    ("name", "value", "is_saved"),
    [
        ("node_labels", {"zone": "a"}, True),
        ("packages", ["scikit-learn>=1.5", "polars"], True),
        ("network", ["pypi.org:443", "*.example.com"], False),
    ],
)
def test_arguments_of_a_new_session_are_sent_and_saved(
    daemon: FakeDaemon, name: str, value: Any, is_saved: bool
) -> None:
    options: dict[str, Any] = {name: value}
    with RemoteExecutor(address=daemon.address, token=TOKEN, **options) as executor:
        executor("1")
        assert executor.saved_kwargs() == {"address": daemon.address, **(options if is_saved else {})}
    (created,) = [request for sent, request in daemon.requests if sent == "CreateSession"]
    assert type(value)(getattr(created, name)) == value
    with pytest.raises(ValueError, match=f"{name} only applies to a new one"):
        RemoteExecutor(session="0" * 32, **options)


def test_what_is_authorized_and_missing_is_said_before_the_model_is_asked(daemon: FakeDaemon) -> None:
    daemon.session.missing_modules.extend(["sklearn", "PIL"])
    daemon.session.images_with_missing.extend(["elsewhere"])
    for having, advice in (("data", "take an image that has them ('data'), "), ("elsewhere", "")):
        daemon.session.images_with_missing[:] = [having]
        daemon.policy.images[:] = ["base", "data"] if advice else ["base"]
        with (
            RemoteExecutor(["sklearn", "PIL"], address=daemon.address, token=TOKEN) as executor,
            pytest.raises(InterpreterError) as refused,
        ):
            executor.send_tools({})
        assert str(refused.value) == (
            "Non-installed authorized modules: sklearn, PIL. The image 'base' does not have them: "
            f'{advice}ask for packages=["pillow", "scikit-learn"], which the policy must allow, '
            "or remove them from the authorized imports; modules that the agent writes itself need not be in them"
        )


def test_where_modules_of_the_workspace_must_be_named_they_are_named_once_they_are_there(daemon: FakeDaemon) -> None:
    """The daemon is not asked for them before, since it would look for them in the image, and for packages."""
    daemon.session.workspace_imports = False
    daemon.session.missing_modules.append("later")  # a step may write it
    files = {"helper.py": b"", "pack/__init__.py": b""}
    with RemoteExecutor(["helper", "pack.*", "later"], address=daemon.address, token=TOKEN, files=files) as executor:
        executor.send_tools({})
    requests = dict(daemon.requests)
    assert list(requests["CreateSession"].authorized_imports) == ["later"]
    assert list(requests["AuthorizeImports"].authorized_imports) == ["helper", "pack.*"]
    assert daemon.names().index("PutFile") < daemon.names().index("AuthorizeImports")


def test_packages_that_can_not_be_had_stop_the_run_before_the_model_is_asked(daemon: FakeDaemon) -> None:
    words = "no wheel of it fits Python 3.11"
    daemon.refusals["CreateSession"].append(Refusal(grpc.StatusCode.FAILED_PRECONDITION, "ENVIRONMENT_FAILED", words))
    executor = RemoteExecutor(address=daemon.address, token=TOKEN, packages=["a"])
    with executor, pytest.raises(EnvironmentFailed, match=words):
        executor.send_tools({})


@tool
def shipped() -> int:
    """Returns how many rows there are."""
    import polars  # type: ignore[import-not-found, unused-ignore]

    return int(polars.DataFrame({"x": [1]}).height)


LACKING = Refusal(
    grpc.StatusCode.INVALID_ARGUMENT, "MODULES_MISSING", "shipped: no polars", progress={"modules": "polars"}
)


@pytest.mark.parametrize("auto", [True, False])
def test_modules_of_shipped_tools_are_added_by_a_policy_that_does_so(daemon: FakeDaemon, auto: bool) -> None:
    daemon.policy.packages.auto = auto
    daemon.refusals["RegisterTools"].append(LACKING)
    with RemoteExecutor(address=daemon.address, token=TOKEN, tool_placement="sandbox") as executor:
        if not auto:
            with pytest.raises(ModulesMissing, match="a session with them as its packages") as refused:
                executor.send_tools({"shipped": shipped})
            assert refused.value.modules == ("polars",)
            return
        executor.send_tools({"shipped": shipped})
        executor("1")
    made = [list(request.modules) for name, request in daemon.requests if name == "CreateSession"]
    assert made == [[], ["polars"]]
    assert daemon.names().count("DeleteSession") == 2


def test_modules_that_stay_missing_are_refused_at_the_second_time(daemon: FakeDaemon) -> None:
    daemon.policy.packages.auto = True
    daemon.refusals["RegisterTools"].extend([LACKING, LACKING])
    with RemoteExecutor(address=daemon.address, token=TOKEN, tool_placement="sandbox") as executor:
        with pytest.raises(ModulesMissing):
            executor.send_tools({"shipped": shipped})
        assert daemon.names().count("CreateSession") == 2


def test_near_end_of_a_limit_is_shown_to_the_watcher_once(
    daemon: FakeDaemon, executor: RemoteExecutor, shown: io.StringIO
) -> None:
    daemon.journal = [warning("operations"), result()]
    assert [executor("1").logs for _ in range(3)] == ["", "", ""]
    assert shown.getvalue() == "Warning: 8,000 of the 10,000 operations that the policy allows are used up\n"


def test_near_end_of_a_sessions_limit_is_reported_to_the_model_once(
    daemon: FakeDaemon, executor: RemoteExecutor
) -> None:
    daemon.journal = [warning("session_operations"), result()]
    notice = "Note: 8,000 of the 10,000 session_operations that the policy allows are used up"
    assert [executor("1").logs for _ in range(2)] == [notice, ""]


def test_warning_without_an_agents_logger_goes_to_the_log(daemon: FakeDaemon, caplog: pytest.LogCaptureFixture) -> None:
    daemon.journal = [warning("operations"), result()]
    with RemoteExecutor(address=daemon.address, token=TOKEN) as executor, caplog.at_level(logging.WARNING):
        executor("1")
    assert "8,000 of the 10,000 operations" in caplog.text


def test_what_the_policy_forbids_reads_as_in_the_local_executor(daemon: FakeDaemon, executor: RemoteExecutor) -> None:
    message = "Attribute __class__ is not allowed"
    error = types.ErrorDetail(type="PolicyDenied", message=message, line=1, statement="().__class__")
    daemon.journal = [result(outcome=types.OUTCOME_POLICY_DENIED, error=error)]
    with pytest.raises(CodeExecutionError) as raised:
        executor("().__class__")
    assert raised.value.outcome is Outcome.POLICY_DENIED
    first = str(raised.value).splitlines()[0]
    assert (
        first == f"Code execution failed at line '().__class__' due to: InterpreterError: Forbidden access: {message}"
    )


def test_limits_that_there_are_not_are_refused_when_the_executor_is_made() -> None:
    with pytest.raises(InvalidRequest, match="no such limits: wall_time"):
        RemoteExecutor(limits={"wall_time": 30})
    with pytest.raises(InvalidRequest, match=r"limits\.operations"):
        RemoteExecutor(limits={"operations": -1})


def test_more_than_the_policy_grants_is_refused_before_the_model_is_asked(daemon: FakeDaemon) -> None:
    listed = types.Violations(
        violations=[types.Violation(field="limits.wall_time_s", requested="1e+09", allowed="at most 3600")]
    )
    refusal = Refusal(grpc.StatusCode.PERMISSION_DENIED, "POLICY_VIOLATION", more=(listed,))
    daemon.refusals["CreateSession"].append(refusal)
    access: dict[str, Any] = {"address": daemon.address, "token": TOKEN, "limits": {"wall_time_s": 1e9}}
    model = ScriptedModel([])  # fails when it is asked
    with (
        CodeAgent(tools=[], model=model, executor_kwargs=access, verbosity_level=-1) as agent,
        pytest.raises(PolicyViolationError, match=r"limits\.wall_time_s: asked for 1e\+09, allowed is at most 3600"),
    ):
        agent.run("go")


def test_quota_that_is_used_up_stops_the_run(daemon: FakeDaemon, executor: RemoteExecutor) -> None:
    """No code can correct it, so an observation would only cost the model step after step."""
    daemon.refusals["Execute"].append(busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", seconds=3600))
    with pytest.raises(DaemonLost, match="refuses to go on"):
        executor("1")


@pytest.mark.parametrize("stream", [False, True])
def test_a_lost_daemon_is_an_exception_for_who_follows_the_steps_only(daemon: FakeDaemon, stream: bool) -> None:
    """A web server such as GradioUI waits for ever for a run that ends by anything but an Exception."""
    daemon.refusals["Execute"].append(busy(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", seconds=3600))
    access = {"address": daemon.address, "token": TOKEN}
    with (
        CodeAgent([], ScriptedModel([Reply("", "1")]), executor_kwargs=access, verbosity_level=-1) as agent,
        pytest.raises(DaemonLost, match="refuses to go on") as raised,
    ):
        list(agent.run("go", stream=stream))
    assert isinstance(raised.value, Exception) is stream
    assert isinstance(raised.value.__cause__, ResourceExhaustedError)


def test_session_of_a_daemon_that_cannot_write_its_audit_log_is_ended(
    daemon: FakeDaemon, executor: RemoteExecutor
) -> None:
    """The daemon answers, so the session need not wait for its idle end."""
    daemon.refusals["Execute"].append(Refusal(grpc.StatusCode.UNAVAILABLE, "AUDIT_UNAVAILABLE"))
    with pytest.raises(DaemonLost):
        executor("1")
    executor.cleanup()
    assert daemon.names()[-1] == "DeleteSession"


def test_value_too_large_to_write_out_is_replaced(
    daemon: FakeDaemon, executor: RemoteExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """smolagents takes `str` of it, which exhausts the memory if a million items share the same bytes.

    The codec's own limit is lower; this one does not depend on it.
    """
    monkeypatch.setattr("executor_client.smolagents.code_output.WRITTEN_CHARS_MAX", 1 << 20)
    daemon.journal = [result([b"x" * 10_000] * 200)]
    output = executor("1").output
    assert (type(output), output.type_name) == (OpaqueValue, "list") and str(output).startswith("[b'xxx")
    daemon.journal = [result([b"x" * 10_000] * 2)]
    assert executor("1").output == [b"x" * 10_000] * 2


def test_limits_can_be_given_as_limits_or_by_name() -> None:
    given = ({"operations": 5, "wall_time_s": 3.0}, Limits(operations=5, wall_time_s=3.0))
    tools = [RemotePythonInterpreterTool(limits=limits) for limits in given]
    executors = [*(tool.executor for tool in tools), *(RemoteExecutor(limits=limits) for limits in given)]
    assert [executor.saved_kwargs()["limits"] for executor in executors] == [given[0]] * 4


def test_a_session_that_is_gone_after_a_restart_is_reported_as_gone(
    daemon: FakeDaemon, executor: RemoteExecutor
) -> None:
    """Its files are gone as well, and the notice of a restarted interpreter would not say so."""
    executor.send_variables(variables={"given": 1})
    daemon.journal = [
        result(outcome=types.OUTCOME_TIMEOUT, variables_state=types.VARIABLES_STATE_RESET, generation=2),
    ]
    daemon.refusals["SetVariables"].append(Refusal(grpc.StatusCode.NOT_FOUND, "SESSION_NOT_FOUND", "no such session"))
    with pytest.raises(CodeExecutionError, match=r"The sandbox had to be replaced.* \(given\)"):
        executor("while True: pass")
    assert daemon.names().count("CreateSession") == 2
