"""The overview and the list of sessions, as a browser without JavaScript and as a reader of the streams get them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client import ExecutorClient, Outcome, Session
from tests.support.console import Browser, running_console
from tests.support.daemon import Daemon, running_daemon
from tests.support.leftovers import DAEMON_PREFIX
from tests.support.polling import eventually

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client() as connected:
        yield connected


def shows(browser: Browser, path: str, text: str) -> bool:
    return eventually(lambda: text in browser.get(path))


def test_an_ended_session_says_why_until_later(browser: Browser, client: ExecutorClient) -> None:
    with client.create_session() as session:
        assert session.execute("1 / 0").outcome is Outcome.EXCEPTION
    assert shows(browser, "/sessions?state=ended", session.session_id)
    page = browser.get("/sessions?state=ended")
    row = page[page.index(session.session_id) :]
    row = row[: row.index("</tr>")]
    assert "exception" in row
    assert "the session was deleted" in row


def test_sessions_are_filtered_by_tenant_image_label_and_state(
    browser: Browser, daemon: Daemon, client: ExecutorClient
) -> None:
    with (
        daemon.client_of("tenant-b") as other,
        client.create_session(labels={"team": "red"}) as red,
        other.create_session(labels={"team": "blue"}) as blue,
    ):
        assert shows(browser, "/sessions", blue.session_id)
        for query, found in {
            "tenant=tenant-b": {blue},
            "label=team": {red, blue},
            "label=team%3Dred": {red},
            "state=idle&label=team": {red, blue},
            "state=ended&label=team": set[Session](),
            "image=none": set[Session](),
            "tenant=tenant-b&label=team%3Dred": set[Session](),
        }.items():
            page = browser.get(f"/sessions?{query}")
            assert {session for session in (red, blue) if session.session_id in page} == found, query


@pytest.mark.parametrize(
    "query", ["page=0", "page=99999999999", "page=x", "state=none", "label==", "tenant=%00%ff", "x=1"]
)
def test_a_strange_filter_is_a_page(browser: Browser, query: str) -> None:
    assert "<h1>Sessions</h1>" in browser.get(f"/sessions?{query}")


def test_texts_of_a_client_stay_texts(browser: Browser, client: ExecutorClient) -> None:
    with client.create_session(labels={"note": HOSTILE}) as session:
        assert shows(browser, "/sessions", session.session_id)
        page = browser.get("/sessions")
        assert "note=&lt;script&gt;alert(1)&lt;/script&gt;<" in page
        assert "<script>" not in page
        assert "\u202e" not in page


def test_changes_come_by_the_stream(browser: Browser, client: ExecutorClient) -> None:
    with browser.events("/events/sessions?state=running") as changes, client.create_session() as session:
        assert any(name == "sessions" and session.session_id in html for name, html in changes)
        session.close()
        assert any(name == "sessions" and session.session_id not in html for name, html in changes)


def test_the_overview_has_state_quotas_and_the_newest_sessions(browser: Browser, client: ExecutorClient) -> None:
    with client.create_session() as session:
        assert shows(browser, "/", session.session_id)
        assert shows(browser, "/", "running since")
        page = browser.get("/")
        assert "<polyline points=" in page
        assert 'href="/sessions?tenant=' in page


def test_a_viewers_console_shows_its_tenant_only_and_lists_no_page_for_admins(
    daemon: Daemon, client: ExecutorClient, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(daemon.new_token("tenant-c", "viewer"))
    with (
        daemon.client_of("tenant-c") as other,
        other.create_session() as own,
        client.create_session() as foreign,
        running_console(
            daemon, "--token-file", str(token), "--daemon", daemon.address, state_dir=tmp_path / "s"
        ) as console,
        console.browser() as browser,
    ):
        assert shows(browser, "/sessions", own.session_id)
        assert foreign.session_id not in browser.get("/sessions")
        assert "does not show how it is" in (page := browser.get("/"))
        assert 'href="/audit"' in page
        assert "What would it decide?" in browser.get("/policy")
        assert 'href="/environments"' not in page


def test_an_approvers_console_says_that_its_token_sees_no_sessions(
    daemon: Daemon, client: ExecutorClient, tmp_path: Path
) -> None:
    """It said that the session did not exist, and listed pages that were refused."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(daemon.new_token("local", "approver"))
    places = ("--token-file", str(token), "--daemon", daemon.address)
    with (
        client.create_session() as session,
        running_console(daemon, *places, "--actions", state_dir=tmp_path / "s") as console,
        console.browser() as browser,
    ):
        assert eventually(lambda: 'href="/audit"' not in browser.get("/approvals"))
        assert 'href="/approvals"' in browser.get("/approvals")
        response = browser.http.get(f"/sessions/{session.session_id}")
        assert response.status_code == 403
        assert "role viewer" in response.text


def test_a_page_says_since_when_the_daemon_is_away_and_goes_on_with_the_next() -> None:
    directory = Path(tempfile.mkdtemp(prefix=DAEMON_PREFIX))
    with running_daemon(directory) as first, running_console(first) as console, console.browser() as browser:
        with first.client() as client:
            session = client.create_session(name="kept", detached=True)
            assert shows(browser, "/sessions", session.session_id)
        with browser.events("/events") as changes:
            first.kill()
            assert any(name == "away" and "has not answered since" in html for name, html in changes)
            assert "has not answered since" in browser.get("/sessions")
            assert session.session_id in browser.get("/sessions")
            with running_daemon(directory):
                assert any(name == "away" and not html for name, html in changes)
                assert shows(browser, "/sessions?state=running", session.session_id)
    shutil.rmtree(directory)
