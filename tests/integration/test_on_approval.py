"""A client that decides approvals, on a real daemon: callbacks of both clients, the command line, a prompt in a terminal."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_client import (
    Approval,
    ApprovalKind,
    AsyncExecutorClient,
    PolicyViolationError,
    Wait,
    WaitKind,
)
from executor_client._core.approvals import WaitingApprovals
from executor_client.smolagents import RemoteExecutor
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.polling import eventually

POLICY = """\
default = "asks"

[profiles.asks]
tools.ask = ["send_*"]
imports.ask = ["csv"]
approvals.wait_s = 60
"""
TRIES = """\
try:
    answer = send_mail("x")
except PermissionError as error:
    answer = str(error)
answer"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as running:
        yield running


def send_mail(text: str) -> str:
    return text * 2


def test_a_callback_decides_for_its_own_sessions_only(daemon: Daemon) -> None:
    """The daemon shows an admin the requests of all; the client that has made no session is not bothered with them."""
    mine: list[Approval] = []
    threads: set[str] = set()
    foreign: list[Approval] = []

    def decide(approval: Approval) -> Any:
        mine.append(approval)
        threads.add(threading.current_thread().name)
        return "once" if len(mine) < 3 else "deny"

    def never(approval: Approval) -> Any:
        foreign.append(approval)
        return "deny"

    waits: list[Wait] = []
    with (
        daemon.client(on_approval=never) as other,
        other.create_session(),
        daemon.client(on_approval=decide, on_wait=waits.append) as client,
        client.create_session(authorized_imports=["csv"]) as session,
    ):
        session.register_tools({"send_mail": send_mail})
        assert session.execute("import csv\n" + TRIES).output == "xx"
        assert "the approver refused it" in session.execute(TRIES).output
    assert [(each.kind, each.what) for each in mine] == [
        (ApprovalKind.IMPORT, "csv"),
        (ApprovalKind.TOOL, "send_mail"),
        (ApprovalKind.TOOL, "send_mail"),
    ]
    first, second, _ = mine
    assert first.request_id and not first.session_id and second.session_id == session.session_id
    assert second.rule == "profiles.asks.tools.ask" and 50 < second.left_s <= 60 and not second.is_waiting
    assert not foreign and threads == {"executor-on-approval"}


def test_a_session_that_waits_for_a_person_is_made_and_reported(daemon: Daemon) -> None:
    waited = threading.Event()

    def note(wait: Wait) -> None:
        if wait.kind is WaitKind.APPROVAL and "import csv" in wait.reason:
            waited.set()

    def decide(approval: Approval) -> Any:
        assert waited.wait(30)
        return "once"

    with (
        daemon.client(on_approval=decide, on_wait=note) as client,
        client.create_session(authorized_imports=["csv"]) as session,
    ):
        assert session.execute("import csv\n1").output == 1


@pytest.mark.parametrize("answer", [lambda _: "yes", lambda _: 1 / 0], ids=["unknown", "raises"])
def test_a_callback_that_fails_denies(daemon: Daemon, answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with daemon.client(on_approval=answer) as client, pytest.raises(PolicyViolationError, match="approver refused it"):
        client.create_session(authorized_imports=["csv"])
    assert "on_approval failed, so this was denied: import csv" in caplog.text


async def test_an_asyncio_client_awaits_its_callback(daemon: Daemon) -> None:
    seen: list[asyncio.AbstractEventLoop] = []

    async def decide(approval: Approval) -> Any:
        await asyncio.sleep(0)
        seen.append(asyncio.get_running_loop())
        return "session"

    async with AsyncExecutorClient(**daemon.access, on_approval=decide) as client:
        session = await client.create_session()
        await session.register_tools({"send_mail": send_mail})
        result = await session.execute(f"{TRIES} + send_mail('y')")
        assert result.output == "xxyy"
    assert seen == [asyncio.get_running_loop()]


def test_a_client_without_the_right_says_once_how_to_get_it(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with daemon.client_of("other", on_approval=lambda _: "once") as client:
        for _ in range(2):
            with client.create_session() as session:
                session.register_tools({"send_mail": send_mail})
                assert "nobody who may approve is connected" in session.execute(TRIES).output
    assert caplog.text.count("--role approver") == 1


def test_an_agent_s_executor_passes_its_callback_on(daemon: Daemon) -> None:
    with RemoteExecutor(["csv"], **daemon.access, on_approval=lambda _: "once") as executor:
        assert executor("import csv\n7").output == 7


def test_the_command_line_lists_a_request_and_approves_it(daemon: Daemon) -> None:
    command = [sys.executable, "-m", "executor_client.cli", "approvals", "--json"]
    lister = subprocess.Popen(
        command, env=environment(daemon), stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with lister, daemon.client() as client, client.create_session() as session:
        session.register_tools({"send_mail": send_mail})
        # Until the lister is connected, a call is denied at once.
        done = threading.Thread(target=lambda: eventually(lambda: session.execute(TRIES).output == "xx"))
        done.start()
        assert lister.stdout is not None
        listed = json.loads(lister.stdout.readline())
        assert (listed["kind"], listed["what"], listed["session_id"]) == ("tool", "send_mail", session.session_id)
        approve = ["approvals", "approve", listed["approval_id"], "--session"]
        assert executor(daemon, *approve).returncode == 0
        done.join()
        assert session.execute(TRIES).output == "xx"  # without another question
        assert "no request with this id waits" in executor(daemon, *approve).stderr
        lister.terminate()


def test_run_asks_at_the_terminal_and_refuses_without_one(daemon: Daemon) -> None:
    run = ["run", "--ask", "--imports", "csv", "-c", "import csv; print('done')"]
    refused = executor(daemon, *run)
    assert refused.returncode == 2 and "--ask has no terminal to ask in" in refused.stderr
    terminal, its_end = pty.openpty()
    command = ["setsid", "-c", "-w", sys.executable, "-m", "executor_client.cli", *run]  # in a terminal of its own
    running = subprocess.Popen(command, env=environment(daemon), stdin=its_end, stdout=its_end, stderr=its_end)
    os.close(its_end)
    shown = until(terminal, b"[d]eny? ")
    assert b"asks to import: csv" in shown and b"profiles.asks.imports.ask" in shown
    os.write(terminal, b"maybe\n")
    until(terminal, b"[d]eny? ")
    os.write(terminal, b"once\n")
    assert b"approved" in until(terminal, b"done")
    assert running.wait() == 0
    os.close(terminal)


def test_an_agent_asks_at_its_terminal_by_default(daemon: Daemon) -> None:
    program = f"""
from executor_client.smolagents import RemoteExecutor

def send_mail(text: str) -> str:
    return text * 2

with RemoteExecutor() as executor:
    executor.send_tools({{"send_mail": send_mail}})
    print("got", executor({TRIES!r}).output)
"""
    command = [sys.executable, "-c", program]
    unattended = subprocess.run(["setsid", "-w", *command], env=environment(daemon), capture_output=True, text=True)
    assert "nobody who may approve is connected" in unattended.stdout, unattended
    terminal, its_end = pty.openpty()
    running = subprocess.Popen(
        ["setsid", "-c", "-w", *command], env=environment(daemon), stdin=its_end, stdout=its_end, stderr=its_end
    )
    os.close(its_end)
    assert b'call the tool: send_mail("x")' in until(terminal, b"[d]eny? ")
    os.write(terminal, b"o\n")
    until(terminal, b"got xx")
    assert running.wait() == 0
    os.close(terminal)


HOSTILE = {
    "\x1b[2J\x9b31m\x07\r": r"\x1b[2J\x9b31m\x07\x0d",
    "\u202egro.ipyp\u2066": r"\u202egro.ipyp\u2066",
    "\u0430pple.com:443": r"\u0430pple.com:443",
    "xn--pple-43d.com:443": r"xn--pple-43d.com:443 (stands for \u0430pple.com:443)",
    "xn--999999999999.com:443": "xn--999999999999.com:443 (stands for xn--999999999999.com:443)",
    "XN--A-ECP.RU\n": r"XN--A-ECP.RU\x0a",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_text_of_a_daemon_can_t_steer_a_terminal_or_pass_for_another(what: str) -> None:
    """The daemon escapes such texts; this is for one that does not."""
    wire = admin_pb.Approval(
        approval_id="1", kind=admin_pb.APPROVAL_KIND_HOST, what=what, rule=what, tenant=what, session_id=what, wait_s=9
    )
    (approval,) = WaitingApprovals().update(admin_pb.WatchApprovalsResponse(approvals=[wire]))
    assert approval.shown.startswith(HOSTILE[what])
    for text in (str(approval), repr(approval), approval.policy_change, approval.tenant):
        assert text.isascii() and text.isprintable()


def environment(daemon: Daemon) -> dict[str, str]:
    return {**os.environ, "EXECUTOR_ADDRESS": daemon.address, "EXECUTOR_TOKEN": daemon.token}


def executor(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `executor` without a terminal."""
    command = [sys.executable, "-m", "executor_client.cli", *arguments]
    return subprocess.run(
        command, env=environment(daemon), capture_output=True, text=True, timeout=60, start_new_session=True
    )


def until(terminal: int, mark: bytes) -> bytes:
    """Reads from a terminal until it has shown this."""
    shown = b""
    while mark not in shown:
        shown += os.read(terminal, 4096)
    return shown
