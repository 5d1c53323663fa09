"""What a console with actions does: decisions on approvals, and actions that are confirmed; and who may not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from html import unescape

import pytest

from executor_client import ExecutionResult, ExecutorClientError, Outcome, Session
from tests.support.backends import require
from tests.support.console import Browser, Console, running_console
from tests.support.daemon import Daemon, daemon_of
from tests.support.polling import eventually

POLICY = """
version = "v7"
default = "team"

[profiles.team]
audit.view = "content"
tools.allowed = ["search"]
tools.ask = ["send_*"]
imports.allowed = ["numpy"]
approvals.wait_s = 30
"""
CODE = "# the report\nprint(send_report('boss'))"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("", "--backend", "local", policy=POLICY) as running:
        yield running


def send_report(to: str) -> str:
    """Sends the report."""
    return f"sent to {to}"


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with daemon.client() as client, client.create_session() as session:
        session.register_tools({"send_report": send_report})
        yield session


@contextmanager
def asking(session: Session, browser: Browser) -> Iterator[tuple[str, Future[ExecutionResult]]]:
    """An execution whose tool call waits for an approval, as the page of this browser shows it: its path."""
    with ThreadPoolExecutor(1) as pool, browser.events("/events/approvals") as changes:
        browser.get("/approvals")
        running = pool.submit(session.execute, CODE)
        for name, html in changes:
            if name == "approvals" and (found := re.search(r'href="(/approvals/[0-9a-f]+)"', html)):
                yield found[1], running
                return


def test_a_waiting_step_goes_on_with_an_approval_for_the_session(browser: Browser, session: Session) -> None:
    with asking(session, browser) as (path, running):
        page = unescape(browser.get(path))
        assert CODE in re.sub("<[^>]+>", "", page)
        assert "profiles.team.tools.ask" in page and 'send_report("boss")?' in re.sub("<[^>]+>", "", page)
        assert '[profiles.team.tools]\nallowed = ["search", "send_report"]' in page
        with browser.events(f"/events{path}") as changes:
            assert browser.post(path, decision="session").status_code == 200
            assert "no longer waits" in next(html for name, html in changes if name == "decided")
        assert running.result().logs == "sent to boss\n"
    assert session.execute(CODE).outcome is Outcome.SUCCEEDED
    again = browser.post(path, decision="once")
    assert (again.status_code, "no request with this id waits" in again.text) == (404, True)


def test_a_refused_import_names_its_line_too(browser: Browser, session: Session) -> None:
    assert session.execute("import socket").outcome is Outcome.IMPORT_DENIED
    line = POLICY.splitlines().index('imports.allowed = ["numpy"]') + 1
    link, page = f'<a href="/policy#line-{line}">', f"/refusals?session={session.session_id}"
    assert eventually(lambda: link in browser.get(page))  # once the console knows the session


def test_a_denial_is_an_error_that_the_program_reads(browser: Browser, session: Session) -> None:
    with asking(session, browser) as (path, running):
        assert browser.post(path, decision="perhaps").status_code == 400
        assert browser.post(path, decision="deny").status_code == 200
        error = running.result().error
    assert error is not None and "the approver refused it" in error.message
    refusals = unescape(browser.get("/refusals"))
    line = POLICY.splitlines().index('tools.ask = ["send_*"]') + 1
    assert f'<a href="/policy#line-{line}">line {line}</a> <code>tools.ask = ["send_*"]</code>' in refusals
    assert "v7, in force" in refusals and "tool send_report" in refusals
    assert f'id="line-{line}"' in browser.get("/policy")


def test_the_audit_log_is_searched_and_the_policy_explained(browser: Browser, session: Session) -> None:
    session.execute("1")
    assert session.session_id in browser.get(f"/audit?kinds=execution_ended&session={session.session_id}")
    assert "No record matches" in browser.get("/audit?kinds=session_lost&text=nowhere")
    assert browser.http.get("/audit?before=-1").status_code == 400
    explained = unescape(browser.post("/policy", tenant="local", question='{"tools": ["rm"]}').text)
    assert "refused" in explained and 'tools.allowed = ["search"]' in explained
    assert "not JSON" in browser.post("/policy", tenant="local", question="{").text


def test_actions_are_confirmed_and_say_what_they_did(browser: Browser, daemon: Daemon, session: Session) -> None:
    end = f"/actions/end?session={session.session_id}"
    assert end in browser.get(f"/sessions/{session.session_id}")
    page = browser.get(end)
    assert session.session_id in page and "destroyed" in page
    assert session.execute("1 + 1").output == 2
    assert browser.http.get("/actions/end").status_code == 400
    assert browser.http.get("/actions/explode").status_code == 404
    assert browser.http.post("/actions/end", data={"session": session.session_id}).status_code == 403
    assert "v7" in browser.post("/actions/reload").text
    assert browser.post("/actions/drain").status_code == 200
    with daemon.client(reconnect_timeout_s=0.01) as client, pytest.raises(ExecutorClientError, match="no new sessions"):
        client.create_session()
    assert browser.post("/actions/resume").status_code == 200
    stopped: list[int] = []

    def stop(_event: object) -> None:
        cancel = f"/actions/cancel?session={session.session_id}&execution=e1"
        assert eventually(lambda: cancel in unescape(browser.get(f"/sessions/{session.session_id}")))
        answer = browser.post("/actions/cancel", session=session.session_id, execution="e1")
        stopped.append(answer.status_code)

    result = session.execute("print('begun')\nwhile True: pass", execution_id="e1", on_event=stop)
    assert (result.outcome, stopped) == (Outcome.CANCELLED, [200])
    assert browser.post("/actions/end", session=session.session_id).status_code == 200
    gone = browser.post("/actions/end", session=session.session_id)
    assert (gone.status_code, "there is no session" in unescape(gone.text)) == (404, True)


@pytest.fixture
def no_console(console: Console) -> None:
    """Stops the one of the other tests: a state directory has one. So this test is the last."""
    if console.process.poll() is None:
        console.stop()


@pytest.mark.usefixtures("no_console")
def test_a_console_without_the_switch_only_shows(daemon: Daemon) -> None:
    with running_console(daemon) as shows, shows.browser() as browser:
        for path in ("/approvals", "/policy", "/fleet"):
            assert "/actions/" not in browser.get(path)
        for path in ("/actions/reload", "/approvals/0"):
            answer = browser.post(path)
            assert (answer.status_code, "--actions" in answer.text) == (403, True)
