"""Packages on the command lines, with a real daemon, uv and an index of the tests: asked for, built, listed, removed."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from executor_client import Approval, ApprovalKind, PolicyViolationError
from tests.support.audit import records
from tests.support.backends import require
from tests.support.console import running_console
from tests.support.daemon import Daemon, daemon_of
from tests.support.fork_server import EXECUTOR, SERVER, run
from tests.support.internet.world import Internet
from tests.support.mcp_host import connected
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import make_wheel
from tests.support.polling import eventually

TIMEOUT_S = 120.0
SCRIPT = """\
# /// script
# requires-python = ">=3.9"
# dependencies = ["glaze>=1", "kiln"]
# ///
import glaze
import kiln
print(glaze.VERSION, kiln.VERSION, kiln.heat())
"""


@dataclass
class World:
    daemon: Daemon
    index: PackageIndex
    directory: Path
    config: str
    policy: str

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "EXECUTOR_STATE_DIR": str(self.daemon.state_dir)}

    def executor(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return run([*EXECUTOR, *arguments], env=self.environment, input=stdin, text=True, timeout=TIMEOUT_S)

    def server(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run([*SERVER, *arguments], env=self.environment, text=True, timeout=TIMEOUT_S)

    def written(self, name: str, text: str) -> str:
        (self.directory / name).write_text(text)
        return str(self.directory / name)


@pytest.fixture
def world(internet: Internet, tmp_path: Path) -> Iterator[World]:
    require("local")
    index = internet.package_index()
    index.add(make_wheel("glaze", "1.0"))
    index.add(make_wheel("glaze", "2.0"))
    kiln = "import glaze\nVERSION = '1.0'\ndef heat():\n    return f'hot {glaze.VERSION}'\n"
    index.add(make_wheel("kiln", "1.0", {"kiln.py": kiln}, requires=["glaze>=1"]))
    index.add(make_wheel("clay", "1.0"))
    index.add(make_wheel("slip", "1.0"))
    config = (
        f'{internet.config()}\n[environments]\nindex_url = "{index.url}"\n'
        f'index_hosts = ["{index.host}:443", "{index.files_host}:443"]\n'
    )
    policy = (
        'default = "potters"\n[profiles.potters]\nimports.allowed = ["*"]\n'
        '[profiles.potters.packages]\nallowed = ["glaze", "kiln"]\nask = ["slip"]\n'
    )
    with daemon_of(config, policy=policy) as daemon:
        yield World(daemon, index, tmp_path, config, policy)


def test_a_script_gets_the_packages_of_its_header_and_the_next_run_starts_warm(world: World) -> None:
    script = world.written("s.py", SCRIPT)
    done = world.executor("run", script)
    assert (done.returncode, done.stdout) == (0, "2.0 1.0 hot 2.0\n"), done.stderr + world.daemon.log.read_text()
    world.index.forget_requests()
    again = world.executor("run", script)
    assert (again.returncode, again.stdout) == (0, "2.0 1.0 hot 2.0\n"), again.stderr
    assert world.index.requests == [], "the environment is there"


def test_an_mcp_host_s_sessions_have_the_packages_of_the_command_line(world: World) -> None:
    with connected(world.environment, "--with", "kiln") as host:
        assert "Value: 'hot 2.0'" in host.run("import kiln\nkiln.heat()")
    with connected(world.environment, "--with", "clay") as host:
        assert "packages: asked for clay, allowed is glaze, kiln" in host.refusal("run_python", code="1")


def test_sandboxes_with_packages_are_kept_ready_from_the_start(world: World) -> None:
    """The daemon makes their environment itself; no client has asked for it."""
    warm = "[[pool.warm]]\nimage = 'base'\nsize = 1\npackages = ['kiln']\n"
    with daemon_of(world.config + warm, policy=world.policy) as daemon, daemon.client() as client:
        assert eventually(lambda: "environment_built" in daemon.log.read_text(), timeout_s=TIMEOUT_S)

        def came_warm() -> bool:
            with client.create_session(packages=["kiln"], authorized_imports=["kiln"]) as session:
                assert session.execute("import kiln\nkiln.heat()").output == "hot 2.0"
                return session.info.warm

        assert eventually(came_warm)
        assert "pool_refill_failed" not in daemon.log.read_text()


def test_an_environment_is_built_listed_shown_and_removed(world: World) -> None:
    requirements = world.written("requirements.txt", "kiln  # with glaze\n")
    built = world.executor("env", "build", requirements)
    assert built.returncode == 0, built.stderr + world.daemon.log.read_text()
    rows = dict(line.split(maxsplit=1) for line in built.stdout.splitlines())
    assert rows["packages"] == "glaze==2.0, kiln==1.0"
    environment_id = rows["environment"]

    listed = json.loads(world.server("env", "list", "--json").stdout)
    (found,) = listed["environments"]
    assert (found["environment_id"], found["sandboxes"], found["tenants"]) == (environment_id, 0, ["local"])
    assert found["pins"] == ["glaze==2.0", "kiln==1.0"]
    table = world.server("env", "list").stdout.splitlines()
    assert table[1].split()[0] == environment_id and table[1].endswith("kiln")

    shown = world.server("env", "show", environment_id)
    assert shown.returncode == 0 and "\nkiln==1.0\n" in shown.stdout and "--hash" not in shown.stdout
    assert "--hash=sha256:" in world.server("env", "show", environment_id, "--json").stdout
    with running_console(world.daemon) as console, console.browser() as browser:
        assert f'href="/environments/{environment_id}"' in browser.get("/environments")
        assert "kiln==1.0 --hash=sha256:" in browser.get(f"/environments/{environment_id}")
    unknown = world.server("env", "show", "env-0")
    assert (unknown.returncode, unknown.stderr) == (1, "NOT_FOUND: there is no environment 'env-0'\n")

    (record,) = [each for each in records(world.daemon.state_dir / "audit") if each["kind"] == "environment_built"]
    assert (record["environment"], record["tenant"], record["outcome"]) == (environment_id, "local", "made")
    assert (
        record["lock_sha256"] == json.loads(world.server("env", "show", environment_id, "--json").stdout)["lock_sha256"]
    )


def test_an_environment_that_needs_an_approval_waits_for_it(world: World) -> None:
    refused = world.executor("env", "build", "--with", "slip")
    assert refused.returncode == 2 and "nobody who may approve is connected" in refused.stderr, refused
    seen: list[Approval] = []

    def answer(approval: Approval) -> str:
        seen.append(approval)
        return "once"

    with world.daemon.client(on_approval=answer) as client:
        assert client.prepare_environment(["slip", "kiln"]).pins == ("glaze==2.0", "kiln==1.0", "slip==1.0")
        with pytest.raises(PolicyViolationError):
            client.prepare_environment(["slip"], ask=False)
    assert [(each.kind, each.what, each.session_id) for each in seen] == [(ApprovalKind.PACKAGE, "slip", "")]


def test_gc_leaves_what_a_sandbox_has_and_is_recorded(world: World) -> None:
    with world.daemon.client() as client, client.create_session(packages=["kiln"]):
        kept = world.server("env", "gc", "--json")
        assert kept.returncode == 0, kept.stderr
        listed = json.loads(world.server("env", "list", "--json").stdout)["environments"]
        assert ["kiln"] in [each["requests"][0]["packages"] for each in listed], "a sandbox has it"
    called = [each for each in records(world.daemon.state_dir / "audit") if each["kind"] == "admin_called"]
    assert {"method": "CollectEnvironments", "target": "0"}.items() <= called[0].items()
