"""A CodeAgent that needs packages which its image lacks: it gets those that the policy allows, and is refused others.

With the real smolagents, a real daemon and uv, on an index of the tests. tests/contract/test_environments.py shows that
sandboxes of every backend see their environments.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from smolagents import LogLevel, tool
from smolagents.local_python_executor import InterpreterError
from smolagents.monitoring import AgentLogger

from examples.scripted import Reply
from executor_client import EnvironmentFailed, ModulesMissing, Outcome, PolicyViolationError, Wait, WaitKind
from executor_client.smolagents import RemoteExecutor
from tests.support.agents import agent_on
from tests.support.audit import records
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of, running_daemon
from tests.support.internet.world import Internet
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel
from tests.support.polling import eventually

# Modules and their distributions differ in their names, and one is named by the policy's own table.
POLICY = """
default = "potters"
[profiles.potters]
imports.allowed = ["*"]
[profiles.potters.packages]
auto = {auto}
allowed = ["pyserial>=1.5", "python-glaze", "kiln", "slip"]
imports = {{ glazing = "python-glaze" }}
"""
FITS = "import glazing\nVERSION = '1.6'\ndef fit(x):\n    return glazing.coat(x) * 2\n"
CODE = """
import serial
from glazing import coat
final_answer([serial.VERSION, serial.fit(20), coat(1)])
"""


@dataclass
class Potters:
    """A daemon whose policy adds packages by itself, and one that does not."""

    index: PackageIndex
    auto: Daemon
    plain: Daemon


def config_of(internet: Internet, index: PackageIndex) -> str:
    return (
        f'pool.size = 0\n{internet.config()}\n[environments]\nindex_url = "{index.url}"\n'
        f'index_hosts = ["{index.host}:443", "{index.files_host}:443"]\n'
    )


@pytest.fixture(scope="module")
def potters(internet: Internet) -> Iterator[Potters]:
    require("local")
    index = internet.package_index()
    index.add(make_wheel("pyserial", "1.4", {"serial.py": "VERSION = '1.4'\n"}))
    index.add(make_wheel("pyserial", "1.6", {"serial.py": FITS}, requires=["python-glaze"]))
    index.add(make_wheel("python-glaze", "2.0", {"glazing/__init__.py": "def coat(x):\n    return x + 1\n"}))
    index.add(make_wheel("kiln", "1.0", {"kiln.py": "def heat():\n    return 'hot'\n"}, requires=["pyserial<1.5"]))
    index.add(make_wheel("clay", "1.0"))
    index.add(make_wheel("slip", "1.0"))
    config = config_of(internet, index)
    with (
        daemon_of(config, policy=POLICY.format(auto="true")) as auto,
        daemon_of(config, policy=POLICY.format(auto="false")) as plain,
    ):
        yield Potters(index, auto, plain)


def test_authorized_imports_bring_their_packages_and_the_same_script_again_starts_warm(potters: Potters) -> None:
    shown = io.StringIO()
    logger = AgentLogger(level=LogLevel.INFO, console=Console(file=shown, width=200))
    for attempt in ("cold", "warm"):
        shown.truncate(0)
        with agent_on(
            potters.auto, CODE, CODE, additional_authorized_imports=["serial", "glazing"], logger=logger
        ) as agent:
            assert agent.run("fire it") == ["1.6", 42, 2], potters.auto.log.read_text()
            assert agent.run("once more") == ["1.6", 42, 2]
            with potters.auto.client() as client:
                (info,) = client.list_sessions()
            assert info.packages == ("pyserial>=1.5", "python-glaze") and info.missing_modules == ()
            assert info.environment_id.startswith("env-")
        if attempt == "warm":
            assert potters.index.requests == [], "the environment is there, and so is what the image lacks"
            assert "waiting for the environment" not in shown.getvalue()
        potters.index.forget_requests()
    created = [record for record in records(potters.auto.state_dir / "audit") if record["kind"] == "session_created"]
    assert [record["packages"] for record in created] == [["pyserial>=1.5", "python-glaze"]] * 2


def test_an_authorized_module_of_no_allowed_package_is_refused_before_the_model_is_asked(potters: Potters) -> None:
    for daemon, modules in ((potters.auto, ["serial", "clay"]), (potters.plain, ["clay"])):
        with (
            agent_on(daemon, Reply("never", CODE), additional_authorized_imports=modules) as agent,
            pytest.raises(InterpreterError) as refused,
        ):
            agent.run("fire it")
        assert str(refused.value).startswith("Non-installed authorized modules: clay. The image 'base' does not have")
        assert 'ask for packages=["clay"], which the policy must allow' in str(refused.value)


def test_packages_that_are_asked_for_are_decided_by_the_policy(potters: Potters) -> None:
    imports = {"additional_authorized_imports": ["serial", "glazing"]}
    wanted = {"packages": ["pyserial", "python_glaze"]}
    with agent_on(potters.plain, CODE, executor_kwargs=wanted, **imports) as agent:
        assert agent.run("fire it") == ["1.6", 42, 2], potters.plain.log.read_text()
    with (
        agent_on(potters.plain, Reply("never", CODE), executor_kwargs={"packages": ["kiln", "clay"]}) as agent,
        pytest.raises(PolicyViolationError) as refused,
    ):
        agent.run("fire it")
    (violation,) = refused.value.violations
    assert (violation.field, violation.requested) == ("packages", "clay")
    assert violation.rule == "profiles.potters.packages.allowed"


def test_packages_that_contradict_each_other_are_an_error_with_the_reason(potters: Potters) -> None:
    executor = RemoteExecutor(packages=["kiln", "pyserial"], **potters.plain.access)
    with executor, pytest.raises(EnvironmentFailed) as failed:
        executor.send_tools({})
    assert "kiln" in failed.value.message and "pyserial" in failed.value.message
    with potters.plain.client() as client:
        assert client.list_sessions() == []


def test_waiting_is_reported_with_its_steps(potters: Potters, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_client._core.waiting.WAIT_REPORTED_AFTER_S", 0.01)
    waits: list[Wait] = []
    with potters.plain.client(on_wait=waits.append) as client:
        client.create_session(packages=["slip"]).close()
    steps = [wait.progress.step for wait in waits if wait.kind is WaitKind.IMAGE and wait.progress is not None]
    assert steps and set(steps) <= {
        "waiting",
        "resolving",
        "downloading",
        "installing",
        "first import",
        "checking",
        "packing",
    }, waits


@tool
def glazed(x: int) -> int:
    """Coats a number.

    Args:
        x: the number
    """
    import glazing  # type: ignore[import-not-found, unused-ignore]

    return int(glazing.coat(x))


def test_modules_of_a_tool_in_the_sandbox_are_brought_and_not_authorized(potters: Potters) -> None:
    placed = {"tool_placement": {"glazed": "sandbox"}}
    with agent_on(potters.auto, "final_answer(glazed(4))", tools=[glazed], executor_kwargs=placed) as agent:
        assert agent.run("coat it") in (4, 5), potters.auto.log.read_text()
        with pytest.raises(InterpreterError, match="Import of glazing is not allowed"):
            agent.python_executor("import glazing")
    with (
        agent_on(potters.plain, Reply("never", CODE), tools=[glazed], executor_kwargs=placed) as agent,
        pytest.raises(ModulesMissing, match="glazing"),
    ):
        agent.run("coat it")


def test_a_line_that_installs_is_answered_with_what_to_do(potters: Potters) -> None:
    with (
        RemoteExecutor(**potters.plain.access) as executor,
        pytest.raises(InterpreterError) as refused,
    ):
        executor("import math\n!pip install python-glaze")
    assert 'create the session with packages=["python-glaze"]' in str(refused.value)
    assert json.dumps(str(refused.value)).isascii()


def test_a_session_with_packages_outlives_a_killed_daemon(internet: Internet) -> None:
    require("local")
    index = internet.package_index()
    index.add(make_wheel("slip", "1.0"))
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    policy, file = directory / "policy.toml", directory / "config.toml"
    policy.write_text(POLICY.format(auto="true"))
    file.write_text(f'policy.file = "{policy}"\n{config_of(internet, index)}')
    with running_daemon(directory, "--config", str(file)) as killed, killed.client() as client:
        imports = ["slip", "importlib"]
        session = client.create_session(packages=["slip"], authorized_imports=imports, detached=True)
        before = session.info
        assert session.execute("import slip; slip.VERSION").output == "1.0"
        killed.kill()
        with running_daemon(directory, "--config", str(file)) as daemon, daemon.client() as again:
            found = again.get_session(session.session_id)
            assert (found.info.packages, found.info.environment_id) == (("slip",), before.environment_id)
            assert found.execute("import importlib; importlib.reload(slip).VERSION").output == "1.0"
            index.forget_requests()
            with again.create_session(packages=["slip"], authorized_imports=["slip"]) as other:
                assert other.info.environment_id == before.environment_id
                assert other.execute("import slip; slip.VERSION").output == "1.0"
            assert index.requests == []
            found.close()
    shutil.rmtree(directory)


def test_many_that_ask_at_once_wait_for_one_environment(internet: Internet) -> None:
    require("local")
    index = internet.package_index()
    index.add(make_wheel("pyserial", "1.6", {"serial.py": "VERSION = '1.6'\n"}))

    def run(number: int) -> object:
        with RemoteExecutor(["serial"], **daemon.access) as executor:
            return executor("import serial\nserial.VERSION").output

    config = config_of(internet, index)
    with daemon_of(config, policy=POLICY.format(auto="true")) as daemon, ThreadPoolExecutor(20) as threads:
        assert list(threads.map(run, range(20))) == ["1.6"] * 20, daemon.log.read_text()
        built = [each for each in records(daemon.state_dir / "audit") if each["kind"] == "environment_built"]
        assert [each["outcome"] for each in built] == ["made"]
        refused = [each for each in records(daemon.state_dir / "audit") if each["kind"].startswith("request")]
        assert refused == [], "waiting is no refusal"
    assert len([path for path in index.requests if path.endswith(".whl")]) == 1


def test_packages_that_are_asked_for_often_have_a_sandbox_ready(internet: Internet) -> None:
    require("local")
    index = internet.package_index()
    index.add(make_wheel("slip", "1.0"))
    config = config_of(internet, index).replace("pool.size = 0", "pool.size = 1")
    wanted: dict[str, Any] = {"packages": ["slip"], "authorized_imports": ["slip"]}
    with (
        daemon_of(config, policy=POLICY.format(auto="false")) as daemon,
        daemon.client() as client,
    ):

        def is_warm() -> bool:
            with client.create_session(**wanted) as session:
                assert session.execute("import slip; slip.VERSION").output == "1.0"
                return session.info.warm

        assert not is_warm()
        assert eventually(is_warm)
        with client.create_session() as other:
            assert not other.info.packages
            assert other.execute("import slip").outcome is not Outcome.SUCCEEDED
