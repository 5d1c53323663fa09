"""Clients on a real fleet: a front over two nodes.

`make test-fleet` runs all tests of the agents and of the clients there; these are the ones of each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from executor_client import AsyncExecutorClient, ExecutorClient, NotFoundError, Outcome, PreconditionError, cli
from executor_client.smolagents import RemoteExecutor
from tests.support.daemon import Daemon
from tests.support.fleet_daemon import NODES, fleet_daemon
from tests.support.polling import eventually


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with fleet_daemon("[pool]\nsize = 0\n") as front:
        yield front


def on_each_node(client: ExecutorClient, stack: ExitStack) -> dict[str, str]:
    """Makes a session on each node; returns their ids by node."""
    sessions = [stack.enter_context(client.create_session(node_labels={"name": node})) for node in NODES]
    return {session.info.node: session.session_id for session in sessions}


def test_a_session_does_all_that_it_does_on_a_daemon_of_its_own(client: ExecutorClient) -> None:
    with client.create_session(authorized_imports=["time"]) as session:
        session.register_tools({"double": lambda x: 2 * x})
        session.set_variables({"x": 21, "large": b"x" * 3_000_000})
        seen: list[object] = []
        result = session.execute("print('a')\ny = double(x)\ny", on_event=seen.append)
        assert (result.output, result.logs, bool(seen)) == (42, "a\n", True)
        assert session.get_variables(["y", "large"]) == {"y": 42, "large": b"x" * 3_000_000}
        session.put_file("a/b.bin", b"y" * 2_000_000)
        assert session.get_file("a/b.bin") == b"y" * 2_000_000
        assert [file.path for file in session.list_files() if not file.is_directory] == ["a/b.bin"]
        assert session.execute("1/0").outcome is Outcome.EXCEPTION
        assert session.evaluate("x") == 21
        assert session.execute("import time; time.sleep(60)", limits={"wall_time_s": 0.5}).outcome is Outcome.TIMEOUT
        assert session.refresh().generation == session.keep_alive().generation
        found = client.get_session(session.session_id)
        assert found.execute("1 + 1").output == 2
    with pytest.raises(NotFoundError):
        client.get_session(session.session_id)


def test_a_state_goes_from_one_node_to_another(client: ExecutorClient) -> None:
    with client.create_session(node_labels={"name": NODES[0]}) as first:
        first.execute("x = [1, 2]")
        state = first.export_state()
    with client.create_session(node_labels={"name": NODES[1]}, state=state) as second:
        assert (second.info.node, second.execute("x").output) == (NODES[1], [1, 2])


def test_sessions_of_all_nodes_are_listed_and_end_with_their_client(daemon: Daemon) -> None:
    with daemon.client() as other:
        before = {info.session_id for info in other.list_sessions()}
        with ExitStack() as stack, daemon.client() as client:
            made = on_each_node(client, stack)
            assert set(made) == set(NODES)
            assert {info.session_id for info in other.list_sessions()} - before == set(made.values())
            stack.pop_all()  # left open: the lease ends them
        assert eventually(lambda: {info.session_id for info in other.list_sessions()} == before)


def test_sessions_are_looked_after_from_the_command_line(
    daemon: Daemon, client: ExecutorClient, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EXECUTOR_ADDRESS", daemon.address)
    monkeypatch.setenv("EXECUTOR_TOKEN", daemon.token)
    with client.create_session(node_labels={"name": NODES[1]}, detached=True) as session:
        digits = session.session_id.rpartition("-")[2][8:20]
        assert cli.main(["ps"]) == 0
        assert f"{NODES[1]}-00000001{digits}" in capsys.readouterr().out
        assert cli.main(["exec", digits, "6 * 7"]) == 0
        assert capsys.readouterr().out == "42\n"
        assert cli.main(["rm", digits]) == 0
        assert [info for info in client.list_sessions() if info.session_id == session.session_id] == []


def test_asyncio_clients_use_sessions_of_several_nodes(daemon: Daemon) -> None:
    async def use() -> list[object]:
        async with AsyncExecutorClient(**daemon.access) as client:
            sessions = [await client.create_session(node_labels={"name": node}) for node in NODES]
            results = await asyncio.gather(*(session.execute(f"{n} + 1") for n, session in enumerate(sessions)))
            for session in sessions:
                await session.close()
            return [result.output for result in results]

    assert asyncio.run(use()) == [1, 2]


def test_an_agents_executor_goes_on_in_another_session(daemon: Daemon) -> None:
    with RemoteExecutor(**daemon.access) as executor:
        executor.send_variables({"x": 20})
        executor.send_tools({"double": lambda x: 2 * x})
        assert executor("double(x) + 2").output == 42
        executor.cleanup()
        executor.send_variables({"x": 1})
        assert executor("x").output == 1


def test_labels_that_no_node_has_are_refused(client: ExecutorClient) -> None:
    with pytest.raises(PreconditionError, match=r"no node has .*the label name=n9") as refused:
        client.create_session(node_labels={"name": "n9"})
    assert refused.value.reason == "NO_NODE"
