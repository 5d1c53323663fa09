"""The commands that root runs in a machine follow the spec; a small machine keeps some memory for itself."""

from __future__ import annotations

import base64
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.backends.e2b import archives, guests
from executor_server.backends.e2b.archives import PackedEnvironment
from executor_server.backends.e2b.failures import CloudFailure, CommandFailed
from executor_server.backends.e2b.guests import Additions, GuestFile, relay_command, start_guest
from executor_server.backends.e2b.templates import Prepared
from executor_server.core.errors import SandboxFailure
from executor_server.core.model import SandboxSpec
from executor_server.guest.wire.tokens import LONG_CHAIN_LENGTH, chained

SPEC = SandboxSpec("base", memory_bytes=2**30, processes=32, disk_bytes=2**24, orphan_time_s=60.0)
GUEST = GuestFile("abc123", b"archive")
TOKEN = b"t" * 32


class Machine:
    """Records its requests; fails as the test asks."""

    cloud_id = "i1"

    def __init__(self, *failures: CloudFailure, lost_uploads: int = 0) -> None:
        self.failures = list(failures)
        self.lost_uploads = lost_uploads
        self.files: dict[str, bytes] = {}
        self.commands: list[str] = []

    async def upload(self, path: str, data: bytes) -> None:
        if self.lost_uploads and "env-" in path:
            self.lost_uploads -= 1
            raise CloudFailure("no answer")
        self.files[path] = data

    async def run(self, command: str, *, timeout_s: float) -> str:
        assert timeout_s > 0
        self.commands.append(command)
        if self.failures:
            raise self.failures.pop(0)
        return ""


async def started(
    machine: Machine,
    prepared: Prepared,
    sandbox_id: str = "f" * 16,
    spec: SandboxSpec = SPEC,
    ca_bundle: Path | None = None,
    environment: PackedEnvironment | None = None,
) -> Any:
    """Returns the configuration that the namespace command got."""
    await start_guest(
        machine,  # type: ignore[arg-type]
        prepared,
        guest=GUEST,
        sandbox_id=sandbox_id,
        token=TOKEN,
        spec=spec,
        preload=["numpy"],
        additions=Additions(ca_bundle, environment),
    )
    words = shlex.split(machine.commands[-1])
    assert words[:6] == ["exec", "python3", "-I", "-S", "/opt/executor/guest-abc123.pyz", "namespaces"]
    return json.loads(words[6])


async def test_the_guest_is_uploaded_and_gets_the_approved_limits() -> None:
    machine = Machine()
    config = await started(machine, Prepared((3, 9), "x86_64", 2**32))
    assert machine.files == {"/opt/executor/guest-abc123.pyz": b"archive"}
    assert config["socket"] == f"/run/executor/{'f' * 16}/guest.sock"
    assert config["uid"] == config["gid"] == guests.SANDBOX_UID
    assert (config["processes"], config["disk_bytes"], config["shm_bytes"]) == (32, 2**24, 2**24)
    assert len(base64.b64decode(config["seccomp"])) % 8 == 0
    guest = config["guest"]
    assert guest["memory_bytes"] == 2**30
    assert guest["watch_memory"] is True
    assert guest["preload"] == ["numpy"]


async def test_the_token_itself_stays_in_the_daemon() -> None:
    machine = Machine()
    config = await started(machine, Prepared((3, 9), "x86_64", 2**32))
    assert config["guest"]["token_hash"] == chained(TOKEN, LONG_CHAIN_LENGTH).hex()
    assert TOKEN.hex() not in machine.commands[-1]


async def test_nothing_of_the_daemon_s_environment_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_canary")
    machine = Machine()
    await started(machine, Prepared((3, 9), "x86_64", 2**32))
    assert "canary" not in machine.commands[-1]


async def test_programs_with_a_network_trust_the_template_or_the_authorities_that_are_given(tmp_path: Path) -> None:
    prepared, spec = Prepared((3, 9), "x86_64", 2**32), replace(SPEC, egress=True)
    without = (await started(Machine(), prepared, spec=spec))["environment"]
    assert without["https_proxy"] == "http://127.0.0.1:3128"
    assert "SSL_CERT_FILE" not in without
    bundle, machine = tmp_path / "ca-1.pem", Machine()
    bundle.write_bytes(b"certificates")
    environment = (await started(machine, prepared, spec=spec, ca_bundle=bundle))["environment"]
    named = {environment[name] for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "GIT_SSL_CAINFO")}
    assert [machine.files[path] for path in named] == [b"certificates"]
    bundle.unlink()
    with pytest.raises(SandboxFailure, match="authorities can't be read"):
        await started(Machine(), prepared, spec=spec, ca_bundle=bundle)


async def test_an_environment_is_uploaded_in_parts_and_only_a_part_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "PART_BYTES", 10)
    file = tmp_path / "archive"
    file.write_bytes(b"0123456789abcdefghijXYZ")
    machine = Machine(lost_uploads=1)
    with PackedEnvironment("env-1", os.open(file, os.O_RDONLY)) as packed:
        config = await started(machine, Prepared((3, 9), "x86_64", 2**32), environment=packed)
    path = "/opt/executor/env-1.tar.gz"
    assert config["packages"] == {"archive": path, "parts": 3, "version": [3, 9]}
    parts = {name: data for name, data in machine.files.items() if name.startswith(path)}
    assert parts == {f"{path}.0": b"0123456789", f"{path}.1": b"abcdefghij", f"{path}.2": b"XYZ"}


async def test_a_small_machine_leaves_some_of_its_memory_to_the_cloud_s_programs() -> None:
    config = await started(Machine(), Prepared((3, 9), "aarch64", 2**29))
    assert config["guest"]["memory_bytes"] == 2**29 - 2**26
    assert config["shm_bytes"] <= config["guest"]["memory_bytes"] // 2


async def test_a_machine_without_a_filter_is_refused() -> None:
    with pytest.raises(SandboxFailure, match="riscv64"):
        await started(Machine(), Prepared((3, 9), "riscv64", 2**32))


async def test_a_start_is_repeated_after_a_lost_answer_and_not_after_a_failure() -> None:
    machine = Machine(CloudFailure("no answer"))
    await started(machine, Prepared((3, 9), "x86_64", 2**32))
    assert len(machine.commands) == 2
    machine = Machine(CommandFailed(1, "cannot make a sandbox here: no pid namespace"))
    with pytest.raises(SandboxFailure, match="no pid namespace"):
        await started(machine, Prepared((3, 9), "x86_64", 2**32))
    assert len(machine.commands) == 1


def test_the_relay_command_uses_the_uploaded_guest() -> None:
    assert shlex.split(relay_command("abc123", "0" * 16)) == [
        *("exec", "python3", "-I", "-S", "/opt/executor/guest-abc123.pyz", "relay"),
        f"/run/executor/{'0' * 16}/guest.sock",
    ]
