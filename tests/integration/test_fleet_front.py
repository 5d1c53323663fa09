"""A real front over two real nodes: clients, the proxy, a drain that moves sessions, and the front's sudden end."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from executor_client import ExecutorClientError, Outcome
from tests.support.backends import require
from tests.support.front_process import FrontProcess, front_over
from tests.support.polling import eventually

POLICY = """
version = "1"
default = "default"
[profiles.default.imports]
default = ["math"]
[profiles.default.state]
export = true
restore = true
"""


@pytest.fixture
def front() -> Iterator[FrontProcess]:
    """Each node has two places."""
    require("local")
    with front_over(["n1", "n2"], policy=POLICY, node="[sessions]\nmax_sessions = 2") as front:
        yield front


def test_sessions_are_spread_over_the_nodes_and_found_again(front: FrontProcess) -> None:
    with front.client() as client:
        sessions = [client.create_session() for _ in range(4)]
        for number, session in enumerate(sessions):
            assert session.execute(f"x = {number}\nx + 1").output == number + 1
        assert {session.session_id.rpartition("-")[0] for session in sessions} == {"n1", "n2"}
        assert {each.session_id for each in client.list_sessions()} == {each.session_id for each in sessions}
    with front.client() as client:
        assert eventually(lambda: not client.list_sessions())


def test_a_drained_node_loses_its_idle_sessions_to_another(front: FrontProcess) -> None:
    with front.client() as client:
        session = client.create_session(labels={"job": "7"}, prelude="ready = True")
        session.execute("x = 41")
        session.put_file("a.txt", b"text")
        node = session.session_id.rpartition("-")[0]
        answer = json.loads(front.command("admin", "drain", node, "--move", "--json"))
        (moved,) = answer["moved"]
        assert (moved["session_id"], moved["problem"]) == (session.session_id, "")
        with pytest.raises(ExecutorClientError, match=moved["new_session_id"]):
            session.execute("x")
        found = client.get_session(moved["new_session_id"])
        assert found.execute("x + 1, ready").output == (42, True)
        assert found.get_file("a.txt") == b"text"
        assert found.info.labels == {"job": "7"}
        assert found.session_id.rpartition("-")[0] != node
        table = front.command("fleet", "status")
        assert "draining" in table
        assert max(map(len, table.splitlines())) <= 80
        found.close()


def test_a_killed_front_is_followed_by_one_that_knows_every_session(front: FrontProcess) -> None:
    with front.client() as client:
        session = client.create_session()
        session.execute("x = 1")
        front.kill()
        assert session.execute("x + 1").output == 2  # the node needs no front for this
        front.start()
        front.wait_until_serving()
        assert [each.session_id for each in client.list_sessions()] == [session.session_id]
        other = client.create_session()
        result = other.execute("1 + 1")
        assert (result.outcome, result.output) == (Outcome.SUCCEEDED, 2)
        assert session.execute("x + 2").output == 3


def test_a_proxy_serves_clients_that_reach_no_node() -> None:
    require("local")
    with (
        front_over(["n1"], fleet="proxy = true", policy=POLICY) as front,
        front.client() as client,
        client.create_session() as session,
    ):
        assert session.info.address == ""
        result = session.execute("for i in range(3):\n    print(i)\n'done'")
        assert (result.output, result.logs) == ("done", "0\n1\n2\n")
        session.put_file("a.bin", b"x" * 1_000_000)
        assert session.get_file("a.bin") == b"x" * 1_000_000
        session.set_variables({"rows": list(range(1000))})
        assert session.get_variables(["rows"])["rows"] == list(range(1000))
        session.register_tools({"double": lambda value: 2 * value})
        assert session.execute("double(21)").output == 42
