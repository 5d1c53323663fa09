"""The page of one session: steps as they happen, for viewers who may see contents and for those who may not."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest

from executor_client import Session
from tests.support.backends import require
from tests.support.console import Browser, Console
from tests.support.daemon import Daemon, daemon_of
from tests.support.polling import eventually

POLICY = """\
version = "7"
default = "content"

[profiles.content]
audit.view = "content"
imports.default = ["sys", "time", "matplotlib.*"]
[profiles.metadata]

[tenants.hidden]
profile = "metadata"
"""
CODE = """\
import sys, matplotlib.pyplot as plt
plt.plot([1, 2]); plt.show()
print("it is", weather("Paris"), "<script>alert(1)</script>\\x1b[31m\\u202e")
print("oops", file=sys.stderr)
open("made.txt", "w").write("x")
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as running:
        yield running


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with daemon.client() as client, client.create_session() as made:
        made.register_tools({"weather": lambda city: f"sunny in {city}"})
        yield made


def test_a_session_shows_its_steps(browser: Browser, session: Session) -> None:
    session.execute(CODE)
    session.execute("1 / 0")
    page = browser.get(f"/sessions/{session.session_id}")
    for text in (
        '<span class="keyword">import</span> sys',
        "<code>weather(&#39;Paris&#39;)</code>",
        "it is sunny in Paris &lt;script&gt;alert(1)&lt;/script&gt;\n",
        "oops",
        "<code>made.txt</code>",
        "ZeroDivisionError: division by zero",
    ):
        assert text in page
    assert not set("\x1b\u202e") & set(page)
    (image,) = re.findall('<img src="(/pictures/[0-9a-f]{64})"', page)
    answer = browser.http.get(image)
    assert answer.headers["content-type"] == "image/png"
    assert answer.content.startswith(b"\x89PNG")
    exported = browser.http.get(f"/sessions/{session.session_id}/export")
    assert exported.headers["content-disposition"].startswith("attachment")
    for text in ("weather(&#x27;Paris&#x27;)", "&lt;script&gt;", "data:image/png;base64"):
        assert text in exported.text
    assert not set("\x1b\u202e") & set(exported.text)


def test_a_step_is_seen_while_it_runs(browser: Browser, session: Session) -> None:
    """The step waits for the viewer, so its output is seen before its end."""
    with browser.events(f"/sessions/{session.session_id}/events") as events:
        seen = []

        def look(until: str) -> str:
            for name, html in events:
                seen.append(html)
                if name == "changes" and until in html:
                    return html
            raise AssertionError(seen)

        session.register_tools({"look": lambda text: look(text)})
        session.execute("print('first'); look('first'); print('second')")
        look("second")
        assert any("succeeded" in html for html in seen) or look("succeeded")
        session.close()
        look("Ended at")


def test_contents_are_not_shown_unless_the_profile_allows_it(daemon: Daemon, browser: Browser) -> None:
    with daemon.client_of("hidden") as client, client.create_session() as session:
        session.register_tools({"note": lambda text: text})
        session.execute("secret = 'secret text'; print(secret); note(secret)")
        session.execute("raise ValueError('secret text')")
        page = browser.get(f"/sessions/{session.session_id}")
        exported = browser.get(f"/sessions/{session.session_id}/export")
    for shown in (page, exported):
        assert "secret" not in shown
        for text in ("The profile does not show contents", "bytes were printed", "note(…)", "ValueError, line 1"):
            assert text in shown
        assert "succeeded" in shown
    assert "continued" not in exported


def test_values_beyond_their_bound_are_named(browser: Browser, session: Session) -> None:
    session.execute("weather('x' * 300_000); 'y' * 300_000")
    for path in (f"/sessions/{session.session_id}", f"/sessions/{session.session_id}/export"):
        shown = browser.get(path)
        assert "weather(…)  a value of 300,0" in shown
        assert shown.count("bytes is not shown") == 2
        assert "unknown time" not in shown
        assert "succeeded" in shown and "xxx" not in shown


def test_the_page_of_a_long_step_is_bounded(browser: Browser, session: Session) -> None:
    session.execute("for i in range(100_000): print(i)")
    path = f"/sessions/{session.session_id}"
    assert eventually(lambda: "\n99999\n" in browser.get(path))  # a page waits a second for steps that have ended
    page = browser.get(path)
    assert "earlier parts are no longer shown" in page
    assert len(page) < 300_000


def test_viewers_that_do_not_read_hold_little_of_a_large_session(
    browser: Browser, console: Console, session: Session
) -> None:
    for _ in range(20):
        session.execute("for number in range(4000): print('<&>' * 25, number)")
    path = f"/sessions/{session.session_id}"
    assert eventually(lambda: len(browser.get(path)) > 4_000_000)
    before_bytes = psutil.Process(console.process.pid).memory_info().rss
    cookies = "; ".join(f"{name}={value}" for name, value in browser.http.cookies.items())
    head = f"GET {path}/events HTTP/1.1\r\nHost: {console.url.removeprefix('http://')}\r\nCookie: {cookies}\r\n\r\n"
    with ExitStack() as stack:
        for _ in range(60):
            connection = stack.enter_context(
                socket.create_connection(("127.0.0.1", int(console.url.rpartition(":")[2])))
            )
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 200"
        assert browser.get(path)
        assert psutil.Process(console.process.pid).memory_info().rss - before_bytes < 60 * 2_000_000
