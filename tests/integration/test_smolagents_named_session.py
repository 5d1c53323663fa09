"""An executor that goes on in a session by its name."""

from __future__ import annotations

import logging

import pytest

from executor_client import ExecutorClient
from executor_client.smolagents import CodeAgent, RemoteExecutor
from tests.support.daemon import Daemon


def test_the_next_executor_goes_on_where_the_last_one_stopped(daemon: Daemon, client: ExecutorClient) -> None:
    with RemoteExecutor(session="analysis", **daemon.access) as first:
        first.send_tools({})
        first("x = 41")
    with RemoteExecutor(session="analysis", **daemon.access) as second:
        second.send_tools({})
        assert second("x + 1").output == 42
    named = client.get_session(name="analysis")
    assert named.info.detached
    named.close()


def test_a_session_that_was_there_says_how_it_differs(
    daemon: Daemon, client: ExecutorClient, caplog: pytest.LogCaptureFixture
) -> None:
    with client.session("plain") as session:
        with (
            caplog.at_level(logging.WARNING),
            RemoteExecutor(["json"], session="plain", labels={"a": "b"}, **daemon.access) as executor,
        ):
            assert executor("1 + 1").output == 2
        assert "'plain' already exists and does not authorize json" in caplog.text
        assert "labels only applies to a new session" in caplog.text
        assert session.execute("1").succeeded


def test_a_session_is_made_with_the_arguments_of_the_executor(daemon: Daemon, client: ExecutorClient) -> None:
    with RemoteExecutor(["json"], session="made", labels={"a": "b"}, **daemon.access) as executor:
        assert executor("import json\njson.dumps([1])").output == "[1]"
    with client.get_session(name="made") as session:
        assert session.info.labels == {"a": "b"} and session.name == "made"


def test_an_id_that_there_is_none_of_makes_no_session(daemon: Daemon) -> None:
    with pytest.raises(ValueError, match="labels"):
        RemoteExecutor(session="0" * 32, labels={"a": "b"}, **daemon.access)


def test_an_agent_passes_the_name_on(daemon: Daemon, client: ExecutorClient) -> None:
    class Model:
        model_id = "none"

        def generate(self, *args: object, **kwargs: object) -> None:
            raise AssertionError

    with client.session("of-agent") as session:
        agent = CodeAgent(
            tools=[], model=Model(), executor_type="remote", executor_kwargs={"session": "of-agent", **daemon.access}
        )
        agent.python_executor("y = 7")
        assert session.get_variables(["y"]) == {"y": 7}
        agent.cleanup()
        assert session.execute("y").output == 7
