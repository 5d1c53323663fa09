"""Sandboxes that see an environment, and those in which the daemon makes one."""

from __future__ import annotations

import asyncio
import os
import platform
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from executor_server.backends.base import Backend, Sandbox
from executor_server.backends.environments import BuildMounts, Target
from executor_server.core.errors import SandboxFailure
from executor_server.core.model import SandboxSpec
from executor_server.guest.wire.paths import ENVIRONMENT_PATH, PROGRAMS_PATH, WORK_PATH
from tests.contract.ahead import ahead, imported
from tests.contract.harness import Harness
from tests.contract.marks import instead, promise
from tests.contract.probes import NodesProbe, Probe, RealProbe
from tests.contract.test_creation import SPEC, answers, nothing_is_left
from tests.contract.test_restarts import started
from tests.contract.wire import Front, harness_of
from tests.support.environments import ENVIRONMENT_ID, MARK, PACKAGES, ServedEnvironments

WITH_PACKAGES = replace(SPEC, packages=PACKAGES)
_TARGET = Target("any", "base", "1")
SITE = f"{ENVIRONMENT_PATH}/site"


def served_by(probe: Probe) -> ServedEnvironments:
    """The environments of the backends of a probe, as their files show them."""
    assert isinstance(probe, RealProbe)
    return ServedEnvironments(probe.state_dir)


def directories_of_environments(probe: Probe | NodesProbe) -> list[Path]:
    state_dirs = probe.state_dirs if isinstance(probe, NodesProbe) else [cast("RealProbe", probe).state_dir]
    return [place for each in state_dirs if (place := each / "environments" / "ready").exists()]


# ---------------------------------------------------------------------------------------------------------------------
# Modules, programs, metadata


@promise("packages")
async def test_a_program_imports_from_the_environment_ahead_of_the_image(harness: Harness) -> None:
    session = await harness.session(packages=PACKAGES, imports=("greeting", "numpy", "importlib.*", "nowhere"))
    assert session.missing_modules == ("nowhere",)
    code = """
import greeting, numpy
from importlib import metadata
greeting.greet(), greeting.__file__, numpy.__version__, metadata.version("greeting")
"""
    run = await harness.run(session, code)
    assert run.output == ("hello", f"{SITE}/greeting/__init__.py", "0.0.1", "1.2")


@promise("packages")
async def test_without_packages_there_is_no_trace_of_an_environment(harness: Harness) -> None:
    code = "import os, sys\nos.path.exists('/run/executor/environment'), 'PYTHONPATH' in os.environ, hasattr(sys, 'marked')"
    run = await harness.run(await harness.session(), code)
    assert run.output == (False, False, False)


@promise("packages")
async def test_the_environment_comes_behind_the_standard_library(harness: Harness) -> None:
    code = f"import os, sys\nsys.path.index(os.path.dirname(os.__file__)) < sys.path.index({SITE!r})"
    assert (await harness.run(await harness.session(packages=PACKAGES), code)).output is True


@promise("packages")
async def test_programs_of_the_environment_are_on_the_path_and_other_pythons_see_it(harness: Harness) -> None:
    code = """
import subprocess, sys
run = lambda *command: subprocess.run(command, capture_output=True, text=True).stdout.split()
run("greet"), run(sys.executable, "-c", "import numpy; print(numpy.__version__)")
"""
    run = await harness.run(await harness.session(packages=PACKAGES), code)
    assert run.output == (["hello", f"{SITE}/greeting/__init__.py"], ["0.0.1"])


@promise("packages")
async def test_modules_of_the_environment_are_libraries_to_the_rules_on_imports(harness: Harness) -> None:
    session = await harness.session(packages=PACKAGES, imports=("greeting",))
    assert (await harness.run(session, "import greeting\ngreeting.greet()")).output == "hello"
    assert (await harness.run(session, "import os")).outcome == "import_denied"
    assert (await harness.run(session, "import numpy")).outcome == "import_denied"


@promise("packages")
async def test_an_error_shows_the_lines_of_the_environment(harness: Harness) -> None:
    run = await harness.run(await harness.session(packages=PACKAGES), "import greeting\ngreeting.fail()")
    assert run.ended.error is not None
    assert "raise ValueError('from the environment')" in run.ended.error.traceback
    assert f'File "{SITE}/greeting/__init__.py", line 7, in fail' in run.ended.error.traceback


@promise("packages")
async def test_an_interpreter_that_replaces_another_has_the_environment_too(harness: Harness) -> None:
    session = await harness.session(packages=PACKAGES)
    assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
    assert (await harness.run(session, "import greeting\ngreeting.greet()")).output == "hello"


@promise("packages")
@pytest.mark.parametrize("version", ["3.9", "3.10", "3.11", "3.12", "3.13"])
async def test_every_python_adds_it_once_behind_its_library_and_ahead_of_its_packages(
    version: str, front: Front | None
) -> None:
    code = f"""
import os, site, sys
import greeting
from importlib import metadata
packages = [sys.path.index(place) for place in site.getsitepackages() if place in sys.path]
at = sys.path.index({SITE!r})
library = sys.path.index(os.path.dirname(os.__file__))
assert library < at < min(packages, default=99) and sys.path.count({SITE!r}) == 1, sys.path
import subprocess
other = subprocess.run([sys.executable, "-c", "import greeting; print(greeting.greet())"], capture_output=True, text=True)
sys.marked, metadata.version("greeting"), other.stdout, sys.version_info[:2]
"""
    async with harness_of(version, front) as harness:
        run = await harness.run(await harness.session(packages=PACKAGES), code)
        assert run.output == (1, "1.2", "hello\n", tuple(map(int, version.split(".")))), run.message


@promise("packages")
async def test_modules_that_the_image_imports_ahead_come_from_the_environment(
    python_with_modules: Path, front: Front | None
) -> None:
    async with ahead("ahead-numpy", python_with_modules, front) as harness:
        session = await harness.session(packages=PACKAGES)
        await imported(harness, session, "_decimal")
        run = await harness.run(session, "import sys\n'numpy' in sys.modules and sys.modules['numpy'].__version__")
        assert run.output == "0.0.1"


# ---------------------------------------------------------------------------------------------------------------------
# Walls


@promise("packages-inside")
async def test_pth_files_run_once_in_the_interpreter_and_never_on_the_host(harness: Harness) -> None:
    session = await harness.session(packages=PACKAGES)
    run = await harness.run(session, f"import os, sys\nsys.marked, os.path.exists({MARK!r})")
    assert run.output == (1, True)
    assert not os.path.exists(MARK)  # noqa: PTH110


@promise("packages-inside")
async def test_a_program_can_not_change_the_environment(harness: Harness) -> None:
    code = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
site = {SITE!r}
def refused(attempt, *args):
    try:
        attempt(*args)
    except OSError as error:
        return error.strerror
    return "done"
def mount(flags):
    if libc.mount(b"none", {ENVIRONMENT_PATH!r}.encode(), None, flags, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
[
    refused(open, f"{{site}}/greeting/__init__.py", "a"),
    refused(open, f"{{site}}/new.py", "w"),
    refused(os.mkdir, f"{{site}}/__pycache__"),
    refused(os.unlink, f"{{site}}/greeting/words.py"),
    refused(os.rename, f"{{site}}/greeting", f"{{site}}/other"),
    refused(os.chmod, site, 0o777),
    refused(os.utime, site),
    refused(os.truncate, f"{{site}}/greeting/words.py", 0),
    refused(mount, 0x1020),
    refused(os.rename, {ENVIRONMENT_PATH!r}, "/run/executor/other"),
]
"""
    outcomes = (await harness.run(await harness.session(packages=PACKAGES), code)).output
    allowed = {"Read-only file system", "Permission denied", "Operation not permitted", "Device or resource busy"}
    assert len(outcomes) == 10 and set(outcomes) <= allowed


@promise("packages-inside")
async def test_a_program_sees_its_environment_and_none_beside_it(harness: Harness) -> None:
    session = await harness.session(packages=PACKAGES)
    for ready in directories_of_environments(harness.probe):
        beside = ready / "env-of-another-tenant"
        beside.mkdir(exist_ok=True)
        (beside / "secret-of-another").touch()
    code = f"""
import os, subprocess
os.listdir({ENVIRONMENT_PATH!r} + "/.."), os.listdir({ENVIRONMENT_PATH!r}), subprocess.run(
    ["find", "/", "-xdev", "-name", "secret-of-another"], capture_output=True, text=True).stdout
"""
    around, inside, found = (await harness.run(session, code)).output
    assert set(around) <= {"environment", "guest.pyz", "socket", "hosts"}
    assert (inside, found) == (["site"], "")


# ---------------------------------------------------------------------------------------------------------------------
# Holds


@promise("packages-held")
async def test_an_environment_is_held_as_long_as_its_sandbox_is_there(backend: Backend, probe: Probe) -> None:
    served = served_by(probe)
    fingerprint = await backend.fingerprint(WITH_PACKAGES)
    assert served.held == set(), "a fingerprint holds nothing"
    sandbox = await backend.create(WITH_PACKAGES)
    assert served.held == {sandbox.sandbox_id} == await probe.existing()
    assert sandbox.fingerprint == fingerprint != await backend.fingerprint(SPEC)
    assert ENVIRONMENT_ID in fingerprint
    await sandbox.destroy()
    assert served.held == set()


@promise("packages-held")
async def test_a_creation_that_fails_or_is_cancelled_holds_nothing(backend: Backend, probe: Probe) -> None:
    served = served_by(probe)
    await served.ready(PACKAGES, _TARGET)
    with pytest.raises(SandboxFailure):
        await backend.create(replace(WITH_PACKAGES, image="unknown"))
    for pause_s in (0.0, 0.01, 0.05):
        creation = asyncio.create_task(backend.create(WITH_PACKAGES))
        await asyncio.wait([creation], timeout=pause_s)
        creation.cancel()
        (made,) = await asyncio.gather(creation, return_exceptions=True)
        if not isinstance(made, BaseException):
            await made.destroy()
    assert served.held == set()
    assert await nothing_is_left(backend, probe)


@promise("packages-held")
async def test_a_sandbox_is_not_made_of_an_environment_that_was_evicted(
    backend: Backend, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between `ready` and `hold` it may be evicted, which the hold reports before anything is mounted."""
    ready = ServedEnvironments.ready

    async def evicted(self: ServedEnvironments, *args: Any) -> Any:
        environment = await ready(self, *args)
        return replace(environment, environment_id="env-that-is-gone")

    monkeypatch.setattr(ServedEnvironments, "ready", evicted)
    with pytest.raises(SandboxFailure, match="gone"):
        await backend.create(WITH_PACKAGES)
    assert await probe.existing() == set()


@promise("packages-held")
async def test_the_next_daemon_keeps_the_hold_of_a_sandbox_that_it_takes_over(probe: Probe) -> None:
    served = served_by(probe)
    known, _ = await probe.left_by_a_killed_daemon(WITH_PACKAGES)
    assert served.held == {known.sandbox_id}
    async with started(probe) as backend:
        adopted = await backend.adopt([known])
        assert served.held == {known.sandbox_id}
        assert adopted[known.sandbox_id].fingerprint == await backend.fingerprint(WITH_PACKAGES)
        await adopted[known.sandbox_id].destroy()
        assert served.held == set()


@promise("packages-held")
async def test_the_next_daemon_gives_up_the_holds_of_sandboxes_that_nobody_knows(probe: Probe) -> None:
    served = served_by(probe)
    await probe.left_by_a_killed_daemon(WITH_PACKAGES)
    served.hold(ENVIRONMENT_ID, probe.name, "0" * 16)  # the killed daemon was about to make it
    async with started(probe) as backend:
        await backend.adopt(())
        assert served.held == set()


# ---------------------------------------------------------------------------------------------------------------------
# BuildSandboxes


@instead("packages-build-sandbox")
async def test_a_backend_without_build_sandboxes_names_the_interpreter_that_none_can_ask(
    backend: Backend, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not hasattr(backend, "create_build_sandbox")
    targets, ready = [], ServedEnvironments.ready

    async def seen(self: ServedEnvironments, packages: Any, target: Target) -> Any:
        targets.append(target)
        return await ready(self, packages, target)

    monkeypatch.setattr(ServedEnvironments, "ready", seen)
    await backend.prepare_environment(WITH_PACKAGES)
    (target,) = targets
    assert target.interpreter is not None
    assert target.interpreter.version == sys.version_info[:2]
    assert (target.interpreter.machine, target.interpreter.libc) == (platform.machine(), "glibc")
    assert target.interpreter.libc_version == tuple(map(int, platform.libc_ver()[1].split(".")[:2]))
    assert await probe.existing() == set()


class BuildSandboxes:
    """A backend whose sandboxes are all build sandboxes, so that programs run in them as in sessions."""

    def __init__(self, backend: Any, mounts: BuildMounts) -> None:
        self._backend = backend
        self._mounts = mounts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    async def create(self, spec: SandboxSpec) -> Sandbox:
        made: Sandbox = await self._backend.create_build_sandbox(spec, self._mounts)
        return made


@asynccontextmanager
async def build_sandboxes(probe: Probe, mounts: BuildMounts) -> AsyncIterator[Harness]:
    backend: Any = BuildSandboxes(probe.backend(), mounts)
    async with Harness(backend) as harness:
        yield harness


@promise("packages-build-sandbox")
async def test_a_build_sandbox_writes_to_its_work_and_reads_its_programs(probe: Probe, directory: Path) -> None:
    work, programs = directory / "work", directory / "programs"
    work.mkdir(mode=0o700)
    programs.mkdir()
    (programs / "tool").write_text("#!/bin/sh\necho made\n")
    (programs / "tool").chmod(0o777)  # the mount is the wall that is tried
    code = f"""
import os, subprocess
made = subprocess.run(["{PROGRAMS_PATH}/tool"], capture_output=True, text=True).stdout
os.makedirs("{WORK_PATH}/cache/a"), os.makedirs("{WORK_PATH}/staging")
with open("{WORK_PATH}/cache/a/file", "w") as file:
    file.write(made)
os.link("{WORK_PATH}/cache/a/file", "{WORK_PATH}/staging/file")
try:
    open("{PROGRAMS_PATH}/tool", "a")
except OSError as error:
    refused = error.strerror
refused, os.path.exists({ENVIRONMENT_PATH!r})
"""
    async with build_sandboxes(probe, BuildMounts(work=work, programs=programs)) as harness:
        first, second = await harness.session(), await harness.session()
        assert (await harness.run(first, code)).output == ("Read-only file system", False)
        again = f"import os\nos.path.samefile('{WORK_PATH}/cache/a/file', '{WORK_PATH}/staging/file')"
        assert (
            await harness.run(second, f"{again} and not os.rename('{WORK_PATH}/staging', '{WORK_PATH}/made')")
        ).output
    assert (work / "made" / "file").read_text() == "made\n"
    assert {path.stat().st_uid for path in (work, *work.rglob("*"))} == {work.stat().st_uid}
    assert os.geteuid() != 0 or work.stat().st_uid != 0


@promise("packages-build-sandbox")
async def test_a_build_sandbox_with_an_environment_sees_it_as_a_session_does(probe: Probe) -> None:
    served = served_by(probe)
    environment = await served.ready(PACKAGES, _TARGET)
    async with build_sandboxes(probe, BuildMounts(environment=environment.directory)) as harness:
        session = await harness.session()
        assert (await harness.run(session, "import greeting\ngreeting.__file__")).output.startswith(SITE)
        denied = await harness.run(session, f"open('{SITE}/new', 'w')")
        assert "Read-only file system" in denied.message


@promise("packages-build-sandbox")
async def test_build_sandboxes_have_a_network_only_when_they_ask_for_one(probe: Probe, directory: Path) -> None:
    async with build_sandboxes(probe, BuildMounts(work=directory / "work", egress=True)) as harness:
        (directory / "work").mkdir()
        session = await harness.session()
        listener = await session._connection.take_listener()
        assert isinstance(listener, socket.socket)
        listener.close()
        assert (await harness.run(session, "import os\n'https_proxy' in os.environ")).output is True
    async with build_sandboxes(probe, BuildMounts(work=directory / "work")) as harness:
        session = await harness.session(egress=True)
        assert (await harness.run(session, "import os\n'https_proxy' in os.environ")).output is False


@promise("packages-build-sandbox")
async def test_a_build_sandbox_leaves_nothing(backend: Any, probe: Probe, directory: Path) -> None:
    (directory / "work").mkdir()
    sandbox = await backend.create_build_sandbox(SPEC, BuildMounts(work=directory / "work"))
    assert await answers(sandbox)
    assert await probe.existing() == {sandbox.sandbox_id}
    await sandbox.destroy()
    assert await probe.existing() == set()
