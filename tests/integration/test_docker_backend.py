"""The Docker backend makes real containers, with the real guest in them, and leaves nothing of them behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.base import KnownSandbox
from executor_server.backends.docker import DockerBackend, check, containers, images, resources
from executor_server.backends.docker.sandbox import DockerSandbox
from executor_server.backends.guest_archive import GuestArchive, pack_archive
from executor_server.core.config.backend_config import DockerImage, DockerSection
from executor_server.core.errors import ImageNotReady, SandboxFailure
from executor_server.core.model import SandboxSpec
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.engine import changed_image, engine_client, engine_line, image_of_files, running_registry
from tests.support.polling import eventually

MIB = 2**20
SPEC = SandboxSpec("base", memory_bytes=256 * MIB, processes=32, disk_bytes=16 * MIB, orphan_time_s=60.0, cpus=1.5)
BASE = DockerImage(reference=DOCKER_IMAGE)


@pytest.fixture
def state_dir() -> Iterator[Path]:
    require("docker")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    yield directory
    shutil.rmtree(directory)


@asynccontextmanager
async def started(state_dir: Path, **section: Any) -> AsyncIterator[DockerBackend]:
    """Provides a backend that has started and adopted, as a daemon's, and closes it at the end."""
    backend = DockerBackend(state_dir, DockerSection(**({"images": {"base": BASE}} | section)))
    await backend.start()
    await backend.adopt(())
    try:
        yield backend
    finally:
        await backend.close()


@pytest.fixture
async def backend(state_dir: Path) -> AsyncIterator[DockerBackend]:
    async with started(state_dir) as ready:
        yield ready


def _containers(state_dir: Path) -> dict[str, dict[str, Any]]:
    """Returns the containers that have something of the state directory mounted, by their ids."""
    with engine_client() as client:
        listed = client.containers(all=True, filters={"label": "executor.daemon"})
    return {
        one["Id"]: one for one in listed if any(mount["Source"].startswith(str(state_dir)) for mount in one["Mounts"])
    }


def _nothing_is_left(state_dir: Path) -> bool:
    return _containers(state_dir) == {} and _names(state_dir / "docker") == {".lock"}


def _names(directory: Path) -> set[str]:
    return {entry.name for entry in directory.iterdir()}


def _inspected(sandbox: DockerSandbox) -> Any:
    with engine_client() as client:
        return client.inspect_container(sandbox.container)


def _answers(sandbox: DockerSandbox) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(sandbox.endpoint.socket_path))
    return True


def _abandon(backend: DockerBackend) -> list[KnownSandbox]:
    """Imitates a killed daemon: its sandboxes live on. Returns the sandboxes that its registry would know."""
    known = [KnownSandbox(one.sandbox_id, SPEC, one.endpoint.token, "docker") for one in backend._live.values()]
    assert backend._directory is not None
    backend._directory.release()
    backend._resources = None
    return known


# ---------------------------------------------------------------------------------------------------------------------
# One sandbox


async def test_the_engine_applies_the_strictest_options_to_a_container(backend: DockerBackend) -> None:
    found = _inspected(await backend.create(SPEC))
    host, config = found["HostConfig"], found["Config"]
    expected = {
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "PidMode": "",
        "UTSMode": "",
        "UsernsMode": "",
        "Privileged": False,
        "ReadonlyRootfs": True,
        "CapAdd": None,
        "CapDrop": ["ALL"],
        "Binds": None,
        "Devices": [],
        "VolumesFrom": None,
        "Memory": SPEC.memory_bytes,
        "MemorySwap": SPEC.memory_bytes,
        "PidsLimit": SPEC.processes,
        "NanoCpus": int(min(1.5, os.cpu_count() or 1) * 10**9),
        "ShmSize": SPEC.disk_bytes,
        "OomKillDisable": False,
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
        "LogConfig": {"Type": "none", "Config": {}},
    }
    assert {name: host[name] for name in expected} == expected
    options = host["SecurityOpt"]
    assert options[0] == "no-new-privileges" and options[1].startswith('seccomp={"defaultAction":"SCMP_ACT_ERRNO"')
    assert "/sys" in host["MaskedPaths"] and "/proc/sys" in host["ReadonlyPaths"]
    limited = {"core", "fsize", "memlock", "msgqueue", "nice", "nofile", "nproc", "rtprio", "sigpending"}
    assert {limit["Name"] for limit in host["Ulimits"]} == limited
    assert set(host["Tmpfs"]) == {"/tmp", "/var/tmp", "/workspace"}
    writable = [mount["Destination"] for mount in found["Mounts"] if mount["RW"]]
    assert sorted(writable) == ["/dev/pts", "/run/executor/socket"]
    assert config["User"].split(":") == [config["Labels"]["executor.user"]] * 2
    assert (config["Hostname"], config["WorkingDir"], config["Healthcheck"]) == (
        "sandbox",
        "/workspace",
        {"Test": ["NONE"]},
    )


async def test_labels_name_the_owner_and_the_parts_of_a_sandbox(backend: DockerBackend) -> None:
    sandbox = await backend.create(SPEC)
    found = _inspected(sandbox)
    labels = found["Config"]["Labels"]
    assert labels["executor.sandbox"] == sandbox.sandbox_id
    assert labels["executor.spec"] == SPEC.fingerprint
    assert labels["executor.fingerprint"] == sandbox.fingerprint == await backend.fingerprint(SPEC)
    assert labels["executor.image"] == found["Image"]
    assert labels["executor.orphan_time_s"] == "60"
    await sandbox.label("0123abcd")
    assert _inspected(sandbox)["Name"] == "/executor-0123abcd"


async def test_the_modules_to_import_ahead_reach_the_guest(state_dir: Path) -> None:
    images = {"base": DockerImage(reference=DOCKER_IMAGE, preload=("numpy",))}
    async with started(state_dir, images=images) as backend:
        entrypoint = _inspected(await backend.create(SPEC))["Config"]["Entrypoint"]
        assert json.loads(entrypoint[-2])["preload"] == ["numpy"]


async def test_the_directory_is_shut_before_the_sandbox_is_used(backend: DockerBackend) -> None:
    """It was open so that the guest could bind its socket there; agent code must not fill the host's disk through it."""
    sandbox = await backend.create(SPEC)
    found = sandbox.directory.stat()
    assert (found.st_mode & 0o777, found.st_uid) == (0o700, os.geteuid())
    assert _names(sandbox.directory) == {"guest.sock"}
    assert _answers(sandbox)


@pytest.mark.parametrize("turns", [0, 1, 3, 8, 20])
async def test_a_cancelled_creation_leaves_nothing(backend: DockerBackend, state_dir: Path, turns: int) -> None:
    creation = asyncio.create_task(backend.create(SPEC))
    for _ in range(turns):
        await asyncio.sleep(0)
    creation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creation
    assert _nothing_is_left(state_dir)


async def test_few_processes_are_enough(backend: DockerBackend) -> None:
    sandbox = await backend.create(replace(SPEC, processes=4))
    assert _answers(sandbox)


async def test_a_guest_that_does_not_start_is_an_error_that_says_why(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(directory: Path) -> GuestArchive:
        return pack_archive({"executor_guest/__init__.py": b"raise RuntimeError('a broken guest')"}, directory)

    monkeypatch.setattr(resources, "pack_guest", broken)
    async with started(state_dir) as backend:
        with pytest.raises(SandboxFailure, match="a broken guest"):
            await backend.create(SPEC)
        assert _nothing_is_left(state_dir)


# ---------------------------------------------------------------------------------------------------------------------
# Ends that the Engine knows of


async def test_a_container_that_was_removed_by_hand_is_reported_as_removed(
    backend: DockerBackend, state_dir: Path
) -> None:
    sandbox = await backend.create(SPEC)
    with engine_client() as client:
        client.remove_container(sandbox.container, force=True, v=True)
    assert await sandbox.cause_of_death() == "its container was removed"
    await sandbox.destroy()
    assert _nothing_is_left(state_dir)


async def test_a_container_that_was_killed_is_reported_as_killed(backend: DockerBackend) -> None:
    sandbox = await backend.create(SPEC)
    with engine_client() as client:
        client.kill(sandbox.container)
    assert await sandbox.cause_of_death() == "its container was killed (exit code 137)"
    assert await sandbox.oom_kills() is None  # the group is removed with the container


async def test_a_living_sandbox_has_no_cause_of_death(backend: DockerBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executor_server.backends.docker.sandbox._CAUSE_TIMEOUT_S", 0.1)
    sandbox = await backend.create(SPEC)
    assert await sandbox.cause_of_death() is None
    assert await sandbox.oom_kills() in (0, None)


# ---------------------------------------------------------------------------------------------------------------------
# Sandboxes of an earlier daemon


async def test_an_adopted_sandbox_s_user_is_given_to_no_other(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first two are the examination's and the build sandboxes'.
    monkeypatch.setattr(resources, "UNIQUE_USERS", range(2_000_000_000, 2_000_000_004))
    killed = DockerBackend(state_dir, DockerSection(images={"base": BASE}))
    await killed.start()
    kept = await killed.create(SPEC)
    async with _restarted(state_dir, _abandon(killed)) as backend:
        other = await backend.create(SPEC)
        assert {kept.user, other.user} == {2_000_000_002, 2_000_000_003}


@asynccontextmanager
async def _restarted(state_dir: Path, known: list[KnownSandbox]) -> AsyncIterator[DockerBackend]:
    backend = DockerBackend(state_dir, DockerSection(images={"base": BASE}))
    await backend.start()
    await backend.adopt(known)
    yield backend
    await backend.close()


async def _stop(sandbox: DockerSandbox) -> None:
    with engine_client() as client:
        client.kill(sandbox.container)
        client.wait(sandbox.container)


async def _remove_socket(sandbox: DockerSandbox) -> None:
    sandbox.endpoint.socket_path.unlink()


async def _exchange_socket(sandbox: DockerSandbox) -> None:
    sandbox.endpoint.socket_path.unlink()
    sandbox.endpoint.socket_path.symlink_to("/var/run/docker.sock")


async def _open_directory(sandbox: DockerSandbox) -> None:
    sandbox.directory.chmod(0o733)


@pytest.mark.parametrize("spoil", [_stop, _remove_socket, _exchange_socket, _open_directory])
async def test_an_incomplete_or_changed_sandbox_is_removed(state_dir: Path, spoil: Any) -> None:
    killed = DockerBackend(state_dir, DockerSection(images={"base": BASE}))
    await killed.start()
    sandbox = await killed.create(SPEC)
    known = _abandon(killed)
    await spoil(sandbox)
    async with _restarted(state_dir, known):
        assert _nothing_is_left(state_dir)


# ---------------------------------------------------------------------------------------------------------------------
# A bad Engine


async def _repeated(action: Callable[[], Awaitable[Any]]) -> Any:
    """Repeats what fails: the Engine of a loaded machine may need more than the 1.5 s that it has here."""
    async with asyncio.timeout(60.0):
        while True:
            with contextlib.suppress(SandboxFailure):
                return await action()


async def _timed(awaitable: Awaitable[Any]) -> Any:
    async with asyncio.timeout(15.0):
        return await awaitable


async def test_an_engine_that_hangs_costs_bounded_waits_and_then_works_again(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "DOCKER_REQUEST_TIMEOUT_S", 1.5)
    async with (
        engine_line(state_dir / "line") as line,
        started(state_dir, host=line.host) as ready,
    ):
        sandbox = await ready.create(SPEC)
        line.hangs = True
        with pytest.raises(SandboxFailure, match="does not answer"):
            await _timed(ready.create(SPEC))
        with pytest.raises(SandboxFailure):
            await _timed(sandbox.destroy())
        with pytest.raises(SandboxFailure):
            await _timed(ready.sweep())
        assert await sandbox.cause_of_death() == "its guest is gone, and the Engine does not answer"
        assert await sandbox.oom_kills() is None
        line.hangs = False
        await _repeated(ready.sweep)  # it repeats the destruction that failed
        assert _nothing_is_left(state_dir)
        sandbox = await _repeated(lambda: ready.create(SPEC))
        assert _answers(sandbox)
        await _repeated(sandbox.destroy)


async def test_a_container_that_was_made_without_an_answer_is_removed(
    state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "DOCKER_REQUEST_TIMEOUT_S", 1.0)
    async with (
        engine_line(state_dir / "line") as line,
        started(state_dir, host=line.host) as ready,
    ):
        line.swallow = b"/containers/create"
        with pytest.raises(SandboxFailure, match="does not answer"):
            await _timed(ready.create(SPEC))
        line.swallow = None
        await ready.sweep()
        assert eventually(lambda: _nothing_is_left(state_dir))


async def test_a_missing_engine_is_reported_in_a_sentence_with_a_remedy(state_dir: Path) -> None:
    backend = DockerBackend(state_dir, DockerSection(host=f"unix://{state_dir}/none"))
    with pytest.raises(SandboxFailure, match=r"does not exist\. Install Docker Engine"):
        await backend.start()
    (finding,) = await backend.check_host()
    assert (finding.subject, finding.ok, finding.required) == ("Engine", False, True)
    await backend.close()


async def test_a_remote_engine_is_refused_with_the_reason(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    with pytest.raises(SandboxFailure, match="not on this host"):
        await DockerBackend(state_dir, DockerSection()).start()


async def test_an_unknown_runtime_is_refused_with_the_known_ones(state_dir: Path) -> None:
    with pytest.raises(SandboxFailure, match=r"no runtime nonsense.*runc"):
        await DockerBackend(state_dir, DockerSection(images={"base": BASE}, runtime="nonsense")).start()


async def test_check_host_accepts_this_host(state_dir: Path) -> None:
    findings = {finding.subject: finding for finding in await DockerBackend(state_dir, _section()).check_host()}
    assert [finding for finding in findings.values() if finding.required and not finding.ok] == []
    assert {"Engine", "runtime", "network namespace", "privileges", "system call filter"} <= set(findings)
    missing = findings["image nowhere"]
    assert not missing.ok and not missing.required and "docker pull" in missing.remedy


def _section() -> DockerSection:
    return DockerSection(images={"base": BASE, "nowhere": DockerImage(reference="executor-test/nowhere")})


# ---------------------------------------------------------------------------------------------------------------------
# Images


async def _refusal(state_dir: Path, reference: str) -> ImageNotReady:
    images = {"base": BASE, "strange": DockerImage(reference=reference)}
    async with started(state_dir, images=images) as backend:
        with pytest.raises(ImageNotReady) as refused:
            await backend.create(replace(SPEC, image="strange"))
        assert _nothing_is_left(state_dir)
    return refused.value


async def test_a_missing_image_is_not_fetched_without_permission(state_dir: Path) -> None:
    refusal = await _refusal(state_dir, "executor-test/nowhere")
    assert "the policy does not allow fetching it" in str(refusal)


async def test_an_image_without_python_is_refused_with_the_reason(state_dir: Path) -> None:
    with image_of_files("executor-test/empty", {"file": b""}) as reference:
        assert "image 'strange' has no Python" in str(await _refusal(state_dir, reference))


async def test_an_image_for_another_machine_is_refused_by_its_architecture(state_dir: Path) -> None:
    with image_of_files("executor-test/other", {"file": b""}, architecture="s390x") as reference:
        assert "is made for linux/s390x" in str(await _refusal(state_dir, reference))


IMPOSTORS = {
    "pypy": ("import sys; sys.implementation.name = 'pypy'; exec(sys.argv[-1])", "has pypy 3."),
    "fails": ("raise SystemExit(3)", r"has a Python that does not run: its container ended at once \(exit code 3\)"),
    "hangs": ("import time; time.sleep(1000)", "has a Python that does not answer"),
}


@pytest.mark.parametrize("kind", IMPOSTORS)
async def test_a_program_that_is_no_python_is_refused(
    state_dir: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "_SOCKET_TIMEOUT_S", 3.0)
    program, text = IMPOSTORS[kind]
    files = {"usr/local/bin/python3": f"#!/usr/bin/python3\n{program}\n".encode()}
    with changed_image(DOCKER_IMAGE, f"executor-test/{kind}", (), files) as reference:
        refusal = await _refusal(state_dir, reference)
    assert re.search(text, str(refusal)), refusal


async def test_the_image_s_own_command_user_and_volumes_have_no_effect(state_dir: Path) -> None:
    """Its command may end at once or never, its user may be root, and its volumes would lie on the host's disk."""
    changes = (
        'ENTRYPOINT ["/bin/sh", "-c", "exit 1"]',
        'CMD ["sleep", "infinity"]',
        "USER root",
        "WORKDIR /root",
        'VOLUME ["/data", "/run", "/workspace"]',
        "HEALTHCHECK CMD true",
        "ENV OF_THE_IMAGE=1 HOME=/root",
    )
    with changed_image(DOCKER_IMAGE, "executor-test/strange", changes) as reference:
        async with started(state_dir, images={"base": DockerImage(reference=reference)}) as backend:
            sandbox = await backend.create(SPEC)
            found = _inspected(sandbox)
            assert _answers(sandbox)
            assert [mount["Destination"] for mount in found["Mounts"] if mount["Type"] == "volume"] == ["/dev/pts"]
            assert set(found["HostConfig"]["Tmpfs"]) == {"/data", "/run", "/tmp", "/var/tmp", "/workspace"}
            assert "Health" not in found["State"]
            environment = dict(entry.split("=", 1) for entry in found["Config"]["Env"])
            assert (environment["OF_THE_IMAGE"], environment["HOME"]) == ("1", "/workspace")


async def test_a_name_that_now_means_another_image_is_noticed(state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "DOCKER_IMAGE_REFRESH_S", 0.01)
    moving = {"base": DockerImage(reference="executor-test/moving")}
    with changed_image(DOCKER_IMAGE, "executor-test/moving", ("LABEL a=1",)):
        async with started(state_dir, images=moving) as backend:
            old = await backend.create(SPEC)
            with changed_image(DOCKER_IMAGE, "executor-test/moving", ("LABEL a=2",)):
                new = await backend.create(SPEC)
                assert old.fingerprint != new.fingerprint == await backend.fingerprint(SPEC)
                await new.destroy()
            await old.destroy()


async def test_a_missing_image_is_fetched_while_requests_are_asked_to_retry(state_dir: Path) -> None:
    spec = replace(SPEC, image="remote", may_pull=True)
    with running_registry() as (registry, reference):
        async with started(state_dir, images={"base": BASE, "remote": DockerImage(reference=reference)}) as backend:
            with pytest.raises(ImageNotReady, match="is being fetched") as text:
                await backend.create(spec)
            assert text.value.retry_after_s is not None
            registry.layer_may_go.set()

            async def outcome() -> str:
                with pytest.raises(ImageNotReady) as refused:
                    await backend.create(spec)
                return str(refused.value)

            text_now = await outcome()
            while "is being fetched" in text_now:
                await asyncio.sleep(0.05)
                text_now = await outcome()
            assert "has no Python" in text_now  # it was fetched and examined
        with engine_client() as client:
            client.remove_image(reference, force=True)


async def test_an_image_that_cannot_be_fetched_is_reported(state_dir: Path) -> None:
    spec = replace(SPEC, image="remote", may_pull=True)
    reference = DockerImage(reference="127.0.0.1:9/nothing/here")
    async with started(state_dir, images={"base": BASE, "remote": reference}) as backend:
        text = ""
        while "could not be fetched" not in text:
            await asyncio.sleep(0.05)
            with pytest.raises(ImageNotReady) as refused:
                await backend.create(spec)
            text = str(refused.value)
        assert "127.0.0.1" not in text
        assert refused.value.retry_after_s is not None
