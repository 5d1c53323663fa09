"""The egress proxy's process: what it can't do any more, and what the daemon does when it was taken over."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from executor_server.core import NetworkRules, NetworkUsage
from executor_server.guest.egress import reasons
from executor_server.network.egress import EgressError, EgressService, EgressSettings
from executor_server.network.egress import service as egress_module
from tests.support.egress_programs import PROGRAMS
from tests.support.egress_service import SOON_S, RecordingSink, bind, egress_service
from tests.support.polling import eventually_async, has_ended
from tests.unit.network.egress.test_reports import CONNECTION, DENIAL

RULES = NetworkRules(allowed=("a.example",))


def _status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _limit(pid: int, name: str) -> tuple[str, str]:
    """The soft and the hard limit."""
    (line,) = (each for each in Path(f"/proc/{pid}/limits").read_text().splitlines() if each.startswith(name))
    soft, hard = line.removeprefix(name).split()[:2]
    return soft, hard


@pytest.fixture
async def pid(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A process whose daemon has credentials in its environment."""
    monkeypatch.setenv("E2B_API_KEY", "e2b-key-of-the-daemon")
    monkeypatch.setenv("EXECUTOR_TOKEN", "token-of-the-daemon")
    async with egress_service() as service:
        await bind(service, RULES)
        assert service.pid is not None
        yield service.pid


# ----------------------------------------------------------------------------------------------------------------------
# Confinement


async def test_process_has_no_capabilities_and_can_gain_none(pid: int) -> None:
    status = _status(pid)
    for name in ("CapInh", "CapPrm", "CapEff", "CapAmb"):
        assert int(status[name], 16) == 0, name
    if os.geteuid() == 0:
        assert int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's daemon can give the process a user of its own")
async def test_roots_process_is_a_user_and_a_group_that_no_list_names(pid: int) -> None:
    status = _status(pid)
    (uid,) = set(status["Uid"].split())
    (gid,) = set(status["Gid"].split())
    assert status["Groups"] == ""
    assert uid == gid != "0"
    with pytest.raises(KeyError):
        pwd.getpwuid(int(uid))
    others = {str(process.uids().real) for process in psutil.process_iter() if process.pid != pid}
    assert uid not in others


async def test_memory_of_the_process_is_for_no_other_process_of_its_user(pid: int) -> None:
    """A process that is not dumpable has its files in /proc owned by root."""
    assert Path(f"/proc/{pid}/mem").stat().st_uid == 0
    assert _limit(pid, "Max core file size") == ("0", "0")
    assert _limit(pid, "Max file size") == ("65536", "65536")


async def test_environment_of_the_process_holds_none_of_the_daemons_credentials(pid: int) -> None:
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"daemon" not in environment
    names = {line.partition(b"=")[0].decode() for line in environment.split(b"\0") if line}
    assert names <= {
        *("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "SSL_CERT_FILE"),
        *("SSL_CERT_DIR", "RES_OPTIONS", "LOCALDOMAIN", "MALLOC_ARENA_MAX", "LC_CTYPE"),
    }


async def test_process_has_the_link_its_listeners_and_no_descriptor_of_the_daemon(pid: int) -> None:
    links = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    files = sorted(link for link in links if not link.startswith(("socket:", "anon_inode:", "pipe:")))
    assert set(files) <= {"/dev/null"}
    # The link, one listener, and the loop's own.
    assert len([link for link in links if link.startswith("socket:")]) <= 5


async def test_process_has_descriptors_for_many_sessions(pid: int) -> None:
    soft, hard = _limit(pid, "Max open files")
    assert int(soft) == int(hard) >= min(65_536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


async def test_process_does_not_follow_the_terminals_signals(pid: int) -> None:
    """Control-C reaches a process group: the daemon drains its sessions first, and they need their network."""
    assert os.getsid(pid) == pid != os.getsid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="the files are root's")
async def test_confined_code_can_neither_read_roots_files_nor_become_root_again(tmp_path: Path) -> None:
    """The steps are tried by a program that does what a proxy that was taken over would."""
    private = tmp_path / "secret"
    private.write_text("x")
    private.chmod(0o600)
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", str(PROGRAMS / "confined.py"), str(private), str(os.getpid())),
        stdout=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(SOON_S):
        out, _ = await program.communicate()
    assert json.loads(out) == {
        "read": "EACCES",
        "setuid": "EPERM",
        "setgid": "EPERM",
        "kill": "EPERM",
        "ptrace": "EPERM",
        "mount": "EPERM",
        "unshare": "EPERM",
        "bpf": "EPERM",
        "raw socket": "EPERM",
        "packet socket": "EPERM",
        "write to a file": "EPERM",
        "make a file": "EPERM",
        "remove a file": "EPERM",
        "run a program": "EPERM",
        "make a process": "EPERM",
        "listen": "EPERM",
        "large file": "EFBIG",
        "more files": "EPERM",
    }


# ----------------------------------------------------------------------------------------------------------------------
# The daemon's end


async def test_process_ends_with_a_daemon_that_is_killed(tmp_path: Path) -> None:
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAMS / "egress_daemon.py"), str(tmp_path / "egress")), stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
    async with asyncio.timeout(SOON_S):
        proxy = psutil.Process(int(await daemon.stdout.readline()))
    assert not has_ended(proxy)
    daemon.send_signal(signal.SIGKILL)
    await daemon.wait()
    assert await eventually_async(lambda: has_ended(proxy), timeout_s=5)


@pytest.mark.parametrize("stops", [signal.SIGSTOP, None], ids=["stopped", "busy"])
async def test_process_that_can_not_read_its_link_ends_with_the_daemon_all_the_same(
    tmp_path: Path, stops: signal.Signals | None
) -> None:
    """The kernel kills it: a loop that is stuck does not see the end of the link."""
    daemon = await asyncio.create_subprocess_exec(
        *(sys.executable, str(PROGRAMS / "egress_daemon.py"), str(tmp_path / "egress")), stdout=asyncio.subprocess.PIPE
    )
    assert daemon.stdout is not None
    async with asyncio.timeout(SOON_S):
        proxy = psutil.Process(int(await daemon.stdout.readline()))
    if stops is not None:
        proxy.send_signal(stops)
    daemon.send_signal(signal.SIGKILL)
    await daemon.wait()
    assert await eventually_async(lambda: has_ended(proxy), timeout_s=5)


# ----------------------------------------------------------------------------------------------------------------------
# A proxy that was taken over

HOSTILE = (sys.executable, "-P", str(PROGRAMS / "hostile_proxy.py"))


@contextlib.asynccontextmanager
async def _hostile(*lines: Any, then: str = "wait") -> AsyncIterator[EgressService]:
    """A service whose process answers as it should, and after `allow` sends these messages or bytes."""
    raw = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    async with egress_service(command=(*HOSTILE, json.dumps(raw), then)) as service:
        yield service


def _report(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, "session": "s", **fields}


OPENED = _report("opened", connection={**CONNECTION, "reason": ""})


async def test_reports_of_a_hostile_proxy_reach_the_session_checked_or_not_at_all() -> None:
    async with _hostile(
        OPENED,
        _report("opened", connection={**CONNECTION, "connection_id": "2", "host": "x\r\n\x1b[0m"}),
        _report("opened", connection={**CONNECTION, "connection_id": "3", "port": 10**9}),
        _report("closed", connection={**CONNECTION, "connection_id": "never"}),
        _report("moved", sent_bytes=-5, received_bytes=1),
        _report("moved", sent_bytes=2**70, received_bytes=1),
        _report("denied", denial={**DENIAL, "reason": "x" * 50}, number=1),
        _report("denied", denial=DENIAL, number=2**80),
        _report("nonsense"),
        {"type": "moved", "session": "of-another-tenant", "sent_bytes": 1, "received_bytes": 1},
        {"type": "moved", "session": ["s"], "sent_bytes": 1, "received_bytes": 1},
        {"type": "done", "number": 10**6},
        {"type": "done", "number": "1"},
        {"type": "failed"},
        {"type": "bind", "session": "s"},
        _report("uncounted", count=3),
    ) as service:
        session = await bind(service, RULES)
        service.allow("s", 1)
        await session.sink.until(lambda: session.sink.uncounted)
        assert [each.host for each in session.sink.opened] == ["x.example", "x???[0m"]
        assert session.sink.closed == []
        assert (session.sink.sent_bytes, session.sink.received_bytes) == (0, 0)
        assert len(session.sink.denied) == 1
        assert service.restarts == 0


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", '{"no": "type"}', '{"type": 5}', "x" * 20_000, '"' + "[" * 5000, '{"type":"ack"}' * 3],
    ids=lambda line: line[:12],
)
async def test_proxy_that_breaks_the_protocol_is_replaced(line: str) -> None:
    async with _hostile(OPENED, line) as service:
        session = await bind(service, RULES)
        service.allow("s", 1)
        await session.sink.until(lambda: session.sink.closed)
        assert session.sink.closed[0].reason == reasons.PROXY_ENDED
        await _restarted(service)


async def test_proxy_that_sends_rubbish_without_end_is_replaced() -> None:
    async with _hostile(_report("closed", connection=CONNECTION), then="flood") as service:
        session = await bind(service, RULES)
        service.allow("s", 1)
        await _restarted(service)
        assert session.sink.closed == []


@pytest.mark.parametrize("then", ["exit", "crash", "close", "silent"])
async def test_proxy_that_does_not_start_fails_the_session_with_a_reason(
    then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor_server.network.egress.proxy_process._START_S", 1.0)
    async with egress_service(command=(*HOSTILE, "[]", f"start-{then}")) as service:
        with pytest.raises(EgressError, match="egress proxy"):
            await bind(service, RULES)


async def test_proxy_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress_module, "_PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(egress_module, "_PING_S", 0.2)
    monkeypatch.setattr(egress_module, "_RELEASE_S", 0.2)
    async with _hostile(OPENED, then="mute") as service:
        session = await bind(service, RULES)
        service.allow("s", 1)
        await session.sink.until(lambda: session.sink.closed)
        assert session.sink.closed[0].reason == reasons.PROXY_ENDED


async def test_waits_for_a_proxy_that_does_not_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_SETTLE_S", "_RELEASE_S"):
        monkeypatch.setattr(egress_module, name, 0.1)
    async with _hostile(OPENED, then="mute") as service:
        session = await bind(service, RULES)
        service.allow("s", 1)
        await session.sink.until(lambda: session.sink.opened)
        async with asyncio.timeout(SOON_S):
            await service.settle("s")
            await service.release("s")
        assert [each.reason for each in session.sink.closed] == [reasons.PROXY_ENDED]


async def test_proxy_that_does_not_end_is_killed() -> None:
    async with _hostile(then="immortal") as service:
        await bind(service, RULES)
        pid = service.pid
        assert pid is not None
        await service.close()
        assert not psutil.pid_exists(pid)


async def test_descriptors_of_a_hostile_proxy_do_not_stay_in_the_daemon() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    async with _hostile(then="descriptors") as service:
        session = await bind(service, RULES)
        service.allow("s", 1)
        await session.sink.until(lambda: session.sink.uncounted >= 50)
        assert len(list(Path("/proc/self/fd").iterdir())) < before + 20


async def test_settings_that_can_not_be_used_are_named(tmp_path: Path) -> None:
    """Found by the process itself, since only it reads them."""
    directory = tmp_path / "egress"
    directory.mkdir(mode=0o700)
    (directory / "authority.key").write_text("rubbish")
    (directory / "authority.key").chmod(0o600)
    (directory / "authority.pem").write_text("rubbish")
    secret = tmp_path / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    service = EgressService(EgressSettings(secrets={"a": secret}), directory)
    try:
        with pytest.raises(EgressError, match="is damaged; remove"):
            await service.bind("s", RULES, _listener(), RecordingSink(), NetworkUsage())
    finally:
        await service.close()


async def _restarted(service: EgressService) -> None:
    async with asyncio.timeout(SOON_S):
        while service.restarts < 1:  # noqa: ASYNC110 - the service has no event for it
            await asyncio.sleep(0.01)


def _listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))
