"""Traces of a real daemon: from the client's span through the call to the execution, at a real collector."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from executor_client import ExecutorClient
from tests.support.backends import require
from tests.support.daemon import Daemon
from tests.support.otlp import attributes
from tests.support.polling import eventually
from tests.support.watched import Watched, watched_daemon


@pytest.fixture(scope="module")
def daemon(watched: Watched) -> Daemon:
    return watched.daemon


def test_an_agents_trace_goes_through_to_the_execution_and_its_tools(watched: Watched, client: ExecutorClient) -> None:
    tracer = TracerProvider().get_tracer("agent")
    with tracer.start_as_current_span("agent step") as step, client.create_session() as session:
        session.register_tools({"double": lambda x: 2 * x})
        assert session.execute("double(21)").output == 42
    trace_id = trace.format_trace_id(step.get_span_context().trace_id)

    def mine(name: str) -> list[object]:
        return [span for span in watched.collector.named(name) if span.trace_id.hex() == trace_id]

    assert eventually(lambda: all(mine(name) for name in ("/CreateSession", "/Execute", "execution", "tool_call")))
    spans = {span.name.rpartition("/")[2]: span for span in watched.collector.spans if span.trace_id.hex() == trace_id}
    assert spans["execution"].parent_span_id == spans["Execute"].span_id
    assert spans["tool_call"].parent_span_id == spans["execution"].span_id
    assert attributes(spans["execution"])["executor.outcome"] == "succeeded"
    assert (
        attributes(spans["execution"])["executor.session_id"]
        == attributes(spans["CreateSession"])["executor.session_id"]
    )


def test_viewers_of_agents_traces_find_steps_tools_and_commands(watched: Watched, client: ExecutorClient) -> None:
    tracer = TracerProvider().get_tracer("agent")
    with client.create_session() as session, tracer.start_as_current_span("agent step") as step:
        session.register_tools({"double": lambda x: 2 * x})
        session.execute("double(21) / 0")
        session.processes.run(["sh", "-c", "exit 3"])
    trace_id = trace.format_trace_id(step.get_span_context().trace_id)

    def found() -> dict[str, dict[str, object]]:
        mine = [span for span in watched.collector.spans if span.trace_id.hex() == trace_id]
        named = {str(attributes(span).get("gen_ai.tool.name")): attributes(span) for span in mine}
        return {name: named[name] for name in ("python", "double", "command") if name in named}

    assert eventually(lambda: len(found()) == 3)
    kinds = {name: attributes["openinference.span.kind"] for name, attributes in found().items()}
    assert kinds == {"python": "CHAIN", "double": "TOOL", "command": "TOOL"}
    assert {attributes["gen_ai.operation.name"] for attributes in found().values()} == {"execute_tool"}
    assert found()["python"]["error.type"] == "exception"
    assert found()["command"]["process.exit.code"] == 3
    assert found()["command"]["error.type"] == "3"


def test_code_and_output_do_not_leave_with_spans(watched: Watched, client: ExecutorClient) -> None:
    with client.create_session() as session:
        session.set_variables({"secret_name": "secret value"})
        execution_id = session.execute("print('secret output'); 1/0  # secret code").execution_id
    assert eventually(
        lambda: any(
            attributes(s).get("executor.execution_id") == execution_id for s in watched.collector.named("execution")
        )
    )
    assert "secret" not in str(watched.collector.spans)


def test_spans_that_wait_leave_when_the_daemon_stops() -> None:
    require("local")
    with watched_daemon() as stopping:
        with stopping.daemon.client() as client, client.create_session() as session:
            session.execute("1 + 1")
        collector = stopping.collector
        stopping.daemon.process.terminate()
        assert stopping.daemon.process.wait(30) == 0
        assert collector.named("execution")


def test_a_dead_collector_costs_no_execution_and_no_stop() -> None:
    require("local")
    with watched_daemon(endpoint="http://127.0.0.1:9") as watched:
        with watched.daemon.client() as client, client.create_session() as session:
            assert session.execute("1 + 1").output == 2
        assert eventually(lambda: "spans_lost" in watched.daemon.log.read_text())
        assert "Traceback" not in watched.daemon.log.read_text()


def test_a_daemon_that_does_not_trace_does_not_import_the_sdk() -> None:
    code = "import sys, executor_server.daemon.daemon, executor_server.api.tracing; print([m for m in sys.modules if 'opentelemetry' in m])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
