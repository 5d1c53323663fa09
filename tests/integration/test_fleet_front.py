"""A real front over two real nodes: clients, a drain that moves sessions, and the front's sudden end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executor_client import ExecutorClientError, PreconditionError, SessionGone
from tests.support.backends import require
from tests.support.fleet_daemon import fleet_daemon
from tests.support.internet.world import Internet
from tests.support.machines import Fleet, fleet_without_cables
from tests.support.package_index.wheels import make_wheel
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
def machines() -> Iterator[Fleet]:
    """Each node has two places."""
    require("local")
    with fleet_without_cables("n1", "n2", policy=POLICY, node_config="[sessions]\nmax_sessions = 2\n") as made:
        yield made


def test_a_drained_node_loses_its_idle_sessions_to_another(machines: Fleet) -> None:
    with machines.client() as client:
        session = client.create_session(labels={"job": "7"}, prelude="ready = True")
        session.execute("x = 41")
        session.put_file("a.txt", b"text")
        node = session.session_id.rpartition("-")[0]
        answer = json.loads(machines.command("admin", "drain", node, "--move", "--json"))
        (moved,) = answer["moved"]
        assert (moved["session_id"], moved["problem"]) == (session.session_id, "")
        with pytest.raises(ExecutorClientError, match=moved["new_session_id"]):
            session.execute("x")
        found = client.get_session(moved["new_session_id"])
        assert found.execute("x + 1, ready").output == (42, True)
        assert found.get_file("a.txt") == b"text"
        assert found.info.labels == {"job": "7"}
        assert found.session_id.rpartition("-")[0] != node
        assert eventually(lambda: "draining" in machines.command("fleet", "status"))  # with the node's next report
        assert max(map(len, machines.command("fleet", "status").splitlines())) <= 80
        found.close()


def test_nothing_that_has_succeeded_is_lost_by_a_move(machines: Fleet) -> None:
    """No execution runs while an agent thinks or sets variables, and all that it did during the move was lost."""
    with machines.client() as client:
        session = client.create_session()
        session.execute("big = bytearray(60_000_000)")
        node = session.session_id.rpartition("-")[0]
        done = 0
        with ThreadPoolExecutor(1) as drain:
            drained = drain.submit(_drain, machines, node)
            while not drained.done():
                try:
                    session.set_variables({"n": done + 1})
                except SessionGone:
                    break  # it was moved between two calls
                done += 1
            (moved,) = drained.result()
        found = client.get_session(moved["new_session_id"] or session.session_id)
        assert found.execute("n").output == done, moved
        assert moved["new_session_id"] or "it was used while it was moved" in moved["problem"]
        assert len(client.list_sessions()) == 1 + bool(moved["new_session_id"]), "no copy is left"
        found.close()


def test_a_session_that_moves_takes_its_name_along_and_is_told_to_leave_its_savepoints(machines: Fleet) -> None:
    with machines.client() as client:
        session = client.create_session(name="analysis", detached=True)
        session.execute("x = 41")
        session.savepoint()
        node = session.session_id.rpartition("-")[0]
        (moved,) = json.loads(machines.command("admin", "drain", node, "--move", "--json"))["moved"]
        assert moved["problem"] == "not moved: its savepoints (1)"
        found = client.get_session(name="analysis")
        assert found.session_id == moved["new_session_id"]
        assert (found.info.detached, found.execute("x + 1").output, found.savepoints()) == (True, 42, [])
        with pytest.raises(PreconditionError, match="has the name"):
            client.create_session(name="analysis")
        found.close()


def test_a_session_with_processes_or_variables_of_the_environment_stays_and_that_is_said(machines: Fleet) -> None:
    with machines.client() as client:
        session = client.create_session()
        process = session.processes.start("sleep 1000", process_id="server")
        others = [client.create_session(env={"TOKEN": "t"}) for _ in range(3)]  # the other node has room for two
        node = session.session_id.rpartition("-")[0]
        kept = next(each for each in others if each.session_id.startswith(f"{node}-"))
        moved = {each["session_id"]: each for each in _drain(machines, node)}
        assert {each["new_session_id"] for each in moved.values()} == {""}
        assert moved[session.session_id]["problem"] == "processes run in it: server"
        assert "environment variables (TOKEN)" in moved[kept.session_id]["problem"]
        process.kill()
        process.wait(20)
        assert kept.processes.run("echo $TOKEN").stdout == "t\n"
        for each in others:
            if each is not kept:
                each.close()
        moved = {each["session_id"]: each for each in _drain(machines, node)}
        assert moved[session.session_id]["new_session_id"], "a process that has ended holds nothing up"


def _drain(machines: Fleet, node: str) -> list[dict[str, str]]:
    answer = json.loads(machines.command("admin", "drain", node, "--move", "--json"))
    moved: list[dict[str, str]] = answer["moved"]
    return moved


LOCK = """\
lock-version = "1.0"
created-by = "uv"
[[packages]]
name = "kiln"
version = "1.0"
wheels = [{{ url = "https://elsewhere/kiln-1.0-py3-none-any.whl", hashes = {{ sha256 = "{sha256}" }} }}]
"""


def test_nodes_install_what_the_lock_of_the_fronts_policy_says_and_have_no_file_of_it(
    internet: Internet, tmp_path: Path
) -> None:
    require("local")
    index = internet.package_index()
    name, content = make_wheel("kiln", "1.0", {"kiln.py": "def heat():\n    return 'hot'\n"})
    index.add((name, content))
    environments = f'index_url = "{index.url}"\nindex_hosts = ["{index.host}:443", "{index.files_host}:443"]'
    config = f"[pool]\nsize = 0\n{internet.config()}[environments]\n{environments}\n"
    lock = tmp_path / "agents.pylock.toml"
    lock.write_text(LOCK.format(sha256=hashlib.sha256(content).hexdigest()))
    policy = f'default = "potters"\n[profiles.potters]\nimports.allowed = ["*"]\npackages.lock = "{lock}"\n'
    with fleet_daemon(config, policy=policy) as front, front.client() as client:
        lock.unlink()  # a node that read it there would refuse the session
        with client.create_session(packages=["kiln"], authorized_imports=["kiln"]) as session:
            assert session.execute("import kiln; kiln.heat()").output == "hot"
