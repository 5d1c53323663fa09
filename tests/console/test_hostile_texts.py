"""More than 50 hostile texts and files from a sandbox, in a real Chromium: nothing runs, nothing leaves its element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executor_client import ExecutorClient
from tests.console.hostile_texts import BROKEN_FILES, FILES, HOST, MARKUP, TERMINAL, TEXTS, UNICODE, unseen
from tests.support.backends import require
from tests.support.chromium import Page, running_chromium
from tests.support.console import Console
from tests.support.daemon import Daemon, daemon_of

POLICY = """\
default = "agents"

[profiles.agents]
audit.view = "content"
tools.ask = ["send"]
approvals.wait_s = 60
"""
AT_ONCE = 12
"""Texts that one step prints. A page shows the newest 20 steps."""
SHOWS = """\
class Shown:
    def __init__(self, kind, data):
        self.kind, self.data = kind, data
    def _repr_mimebundle_(self, include=None, exclude=None):
        return {self.kind: self.data, "text/html": HTML, "image/svg+xml": SVG}
for kind, data in FILES:
    display(Shown(kind, data))
"""
# What no page has, whether a text made it or not.
FOREIGN = (
    "[data-hostile], main :is(script, iframe, object, embed, style, link, base, meta, math, video, template), [style]"
)
AWAY = """[...document.querySelectorAll("a[href], img[src], form, [hx-get], [sse-connect]")].map(each =>
  new URL(each.href ?? each.src ?? each.getAttribute("sse-connect") ?? each.getAttribute("action") ?? "", location.href))
  .filter(url => url.origin !== location.origin).map(String)"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture(scope="module")
def page(console: Console) -> Iterator[Page]:
    with running_chromium() as chromium, chromium.page() as made:
        made.open(console.link())
        made.until("location.pathname === '/'")
        yield made


def groups(texts: Mapping[str, str], number: int) -> Iterator[dict[str, str]]:
    names = list(texts)
    for first in range(0, len(names), number):
        yield {name: texts[name] for name in names[first : first + number]}


def is_harmless(page: Page, console: Console) -> None:
    """Nothing of the texts ran, became an element, leads away from the console, or can't be seen."""
    assert page.evaluate("window.hostile") is None
    assert page.evaluate(f"document.querySelectorAll({FOREIGN!r}).length") == 0
    assert page.evaluate(AWAY) == []
    assert not unseen(page.evaluate("document.documentElement.textContent"))
    assert page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0
    assert not page.events("Page.javascriptDialogOpening")
    asked = {event["request"]["url"] for event in page.events("Network.requestWillBeSent")}
    assert {url for url in asked if not url.startswith((console.url, "file:"))} <= {"about:blank"}


def test_texts_of_a_session_stay_texts(console: Console, client: ExecutorClient, page: Page, tmp_path: Path) -> None:
    steps: list[dict[str, str]] = [*groups(MARKUP | UNICODE, AT_ONCE), *groups(TERMINAL, 1)]
    with client.create_session() as session:
        session.register_tools({"note": lambda *texts: texts[0]})
        page.open(f"{console.url}/sessions/{session.session_id}")
        for number, texts in enumerate(steps, 1):
            code = [f"# {text}" for text in texts.values() if not set(text) & set("\n\r\0\ud800\udfff\u2028\u2029\x85")]
            for name, text in texts.items():
                code.append(f"print('step {number}: {name}:', {text!r}, 'the end')")
                code.append(f"note({text[:500].encode(errors='ignore').decode()!r}, text={text[:200]!r})")
            last = next(reversed(texts.values()))
            code.append(f"open({last.replace('/', '|').replace(chr(0), '')[:60]!r}, 'w', errors='ignore').close()")
            code.append(f"raise ValueError({last!r})")
            session.execute("\n".join(code))
        names = [(number, name) for number, texts in enumerate(steps, 1) for name in texts]
        assert page.shows(f"step {len(steps)}: {names[-1][1]}:")
        for reload in (False, True):  # as changes, and as a page
            if reload:
                page.open(f"{console.url}/sessions/{session.session_id}")
            assert page.evaluate("document.querySelectorAll('#steps > li').length") == len(steps)
            shown = page.evaluate("[...document.querySelectorAll('#steps > li')].map(each => each.textContent)")
            for number, name in names:
                assert f"step {number}: {name}:" in shown[number - 1], name
            is_harmless(page, console)
        with console.browser() as browser:
            (tmp_path / "export.html").write_text(browser.get(f"/sessions/{session.session_id}/export"))
    page.open(f"{console.url}/audit")
    is_harmless(page, console)
    page.open((tmp_path / "export.html").as_uri())
    assert page.shows(f"step {len(steps)}: {names[-1][1]}:")
    assert page.evaluate("window.hostile") is None
    assert page.evaluate("document.querySelectorAll('[data-hostile], script').length") == 0
    assert HOST not in str(page.events("Network.requestWillBeSent"))


def test_files_that_claim_to_be_images_are_none(console: Console, client: ExecutorClient, page: Page) -> None:
    files = [("image/png", data) for data in (FILES | BROKEN_FILES).values()]
    with client.create_session() as session:
        text = f"FILES, HTML, SVG = {files!r}, {MARKUP['script']!r}, {MARKUP['SVG']!r}\n"
        session.execute(text + SHOWS + "print('all', 'shown')")
        page.open(f"{console.url}/sessions/{session.session_id}")
        assert page.shows("all shown")
        is_harmless(page, console)
        images = page.evaluate("[...document.images].map(each => each.src)")
        assert len(images) == 1  # the one that is a PNG, too; it is passed on without what follows
        for url in images:
            kind, body = page.evaluate(
                f"fetch({url!r}).then(async each => [each.headers.get('content-type'), await each.text()])"
            )
            assert kind == "image/png" and "<" + "script" not in body and "<svg" not in body


def test_a_hostile_request_for_approval_deceives_nobody(console: Console, client: ExecutorClient, page: Page) -> None:
    argument = "".join(TEXTS.values())[:4000].encode(errors="ignore").decode()
    page.open(f"{console.url}/approvals")
    with client.create_session() as session, ThreadPoolExecutor(1) as pool:
        session.register_tools({"send": lambda text: text})
        run: Any = pool.submit(session.execute, f"send({argument!r})")
        page.until("!!document.querySelector('main a[href^=\"/approvals/\"]')")
        is_harmless(page, console)
        page.click("main a[href^='/approvals/']")
        assert page.shows("The code that asks")
        is_harmless(page, console)
        assert page.evaluate("document.querySelectorAll('button[name=decision]').length") == 3
        page.click("button[value=deny]")
        assert page.shows("Denied")
        assert "the approver refused it" in run.result().error.message
    assert HOST in argument
