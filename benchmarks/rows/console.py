"""How fast the console is: its pages with 1,000 sessions, and a change on the screen of a browser."""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.bench import Bench, serving
from benchmarks.figures import AtMost, Figure, Reference, timed
from benchmarks.references import Unmeasurable
from benchmarks.rows.sessions import CLIENTS
from benchmarks.web import running_console
from executor_client import Session
from tests.support.chromium import Browser, Page, find_chromium

_SESSIONS = 1_000
_LIVE = 20
_ROUNDS = 100
_CHANGES = 50
_SETTLE_S = 2.0
_POLICY = """
default = "seen"
[profiles.seen]
audit.view = "content"
"""
_CHANGE = """new Promise(resolve => {
  const look = () => document.body.innerText.includes(%s) && resolve(true)
  new MutationObserver(look).observe(document.body, {childList: true, subtree: true, characterData: true})
  look()
})"""


def pages(bench: Bench) -> Iterator[Figure]:
    """Pages that a console with 1,000 sessions, most of them ended, serves in turns with a small file of it."""
    with serving("local") as served, running_console(served.daemon) as link, ThreadPoolExecutor(CLIENTS) as clients:

        def used(_number: int) -> Session:
            session = served.client.create_session()
            session.execute("1+1")
            return session

        sessions: list[Session] = []
        for first in range(0, _SESSIONS, _LIVE):
            for session in sessions:
                session.close()
            sessions = list(clients.map(used, range(first, min(first + _LIVE, _SESSIONS))))
        time.sleep(_SETTLE_S)
        with _SignedIn(link) as browser:
            assert f"of {_SESSIONS:,}" in browser.get("/sessions")
            first_ms, list_ms, file_ms = bench.in_turns(
                _ROUNDS,
                lambda: timed(lambda: browser.get("/")),
                lambda: timed(lambda: browser.get("/sessions")),
                lambda: timed(lambda: browser.get("/static/console.css")),
            )
    reference = Reference("a file of it", file_ms)
    yield Figure(f"console: first page, {_SESSIONS:,} sessions", "ms", first_ms, reference, AtMost(100))
    yield Figure(f"console: sessions, {_SESSIONS:,} of them", "ms", list_ms, reference, AtMost(100))


def changes(bench: Bench) -> Iterator[Figure]:
    """A line that a program prints, until Chromium shows it on the page of its session."""
    program = find_chromium()
    if program is None:
        raise Unmeasurable("there is no chromium")
    numbers = itertools.count()
    with (
        tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp", ignore_cleanup_errors=True) as directory,
        ExitStack() as stack,
    ):
        policy = Path(directory) / "policy.toml"
        policy.write_text(_POLICY)
        served = stack.enter_context(serving("local", f"policy.file = {json.dumps(str(policy))}\n"))
        link = stack.enter_context(running_console(served.daemon))
        session = stack.enter_context(served.client.create_session())
        browser = Browser(program, Path(directory) / "profile")
        try:
            with browser.page() as page:
                page.open(link)
                page.until("location.pathname === '/'")
                page.open(f"{link.partition('/sign-in')[0]}/sessions/{session.session_id}")

                def shown() -> float:
                    text = f"line-{next(numbers)}."
                    return timed(lambda: _seen(page, session, text))

                shown_ms, execute_ms = bench.in_turns(
                    _CHANGES, shown, lambda: timed(lambda: session.execute(f"print({next(numbers)})"))
                )
        finally:
            browser.close()
    yield Figure("console: a line on the screen", "ms", shown_ms, Reference("execute", execute_ms), AtMost(300))


def _seen(page: Page, session: Session, text: str) -> None:
    # In two halves, because the page shows the code first.
    session.execute(f"print({text[:3]!r} + {text[3:]!r})")
    page.evaluate(_CHANGE % json.dumps(text))


class _SignedIn:
    """A connection that is signed in."""

    def __init__(self, link: str) -> None:
        parts = urlsplit(link)
        assert parts.hostname is not None
        self._connection = HTTPConnection(parts.hostname, parts.port, timeout=60)
        self._connection.request("GET", f"{parts.path}?{parts.query}")
        answer = self._connection.getresponse()
        answer.read()
        self._headers = {"cookie": (answer.getheader("set-cookie") or "").partition(";")[0]}

    def get(self, path: str) -> str:
        self._connection.request("GET", path, headers=self._headers)
        answer = self._connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        return text

    def __enter__(self) -> _SignedIn:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
