"""What a person sees and does in a real Chromium: live pages, decisions, refusals; by keyboard, and at 400 % zoom."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from examples.scripted import Reply
from executor_client import ExecutorClient, Outcome, PolicyViolationError
from tests.support.agents import agent_on
from tests.support.backends import require
from tests.support.chromium import Browser, Page, running_chromium
from tests.support.console import Console, running_console
from tests.support.daemon import Daemon, daemon_of
from tests.support.polling import eventually

CONFIG = "pool.size = 0\n"
POLICY = """\
version = "browser-test"
default = "agents"

[profiles.agents]
audit.view = "content"
tools.ask = ["send_*"]
approvals.wait_s = 60

[profiles.agents.limits.max]
wall_time_s = 60
"""
SENDS = "answer = send_report('the draft')\nanswer"
PAGES = ("/", "/sessions", "/approvals", "/refusals", "/recordings", "/environments", "/fleet", "/audit", "/policy")
# The lowest contrast of a text with what is behind it; WCAG wants 4.5 for all but large letters.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true})
  const mixed = colors => { canvas.clearRect(0, 0, 1, 1)
    for (const color of colors) { canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1) }
    return canvas.getImageData(0, 0, 1, 1).data }
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0)
  const behind = element => element ? [...behind(element.parentElement), getComputedStyle(element).backgroundColor] : []
  let worst = [21, ""]
  for (const element of document.body.querySelectorAll("*")) {
    const isText = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())
    if (!isText || !element.checkVisibility() || element.matches(".visually-hidden, .skip")) continue
    const back = behind(element), front = [...back, getComputedStyle(element).color]
    const [low, high] = [light(mixed(back)), light(mixed(front))].sort((a, b) => a - b)
    const ratio = (high + 0.05) / (low + 0.05)
    if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 200)]
  }
  return worst
})()"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of(CONFIG, policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def chromium(daemon: Daemon) -> Iterator[Browser]:
    with running_chromium() as running:
        yield running


@pytest.fixture(scope="module")
def client(daemon: Daemon) -> Iterator[ExecutorClient]:
    with daemon.client() as connected:
        yield connected


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def page(console: Console, chromium: Browser) -> Iterator[Page]:
    with signed_in(chromium, console.link()) as made:
        yield made


@contextmanager
def signed_in(chromium: Browser, link: str) -> Iterator[Page]:
    """A page of a browser that has signed in by link, on the overview."""
    with chromium.page() as page:
        page.open(link)
        page.until("location.pathname === '/'")
        yield page
        violations = [each["entry"]["text"] for each in page.events("Log.entryAdded") if "Policy" in str(each)]
        assert not violations  # of the page's own rules about scripts and styles


def send_report(text: str) -> str:
    """Sends a report.

    Args:
        text: what it says
    """
    return f"sent {text}"


def test_a_link_signs_in_once_and_signing_out_ends_it(console: Console, chromium: Browser, page: Page) -> None:
    assert page.shows("Overview")
    with chromium.page() as stranger:
        stranger.open(f"{console.url}/")
        assert stranger.shows("You are not signed in")
    page.click("form[action='/sign-out'] button")
    assert page.shows("You are not signed in")


def test_a_session_is_seen_while_it_runs_and_why_it_ended(
    console: Console, client: ExecutorClient, page: Page, pool: ThreadPoolExecutor
) -> None:
    seen = threading.Event()
    with client.create_session(name="watched") as session:
        session.register_tools({"wait_for_viewer": lambda: seen.wait(30)})
        page.open(f"{console.url}/sessions")
        page.click(f"a[href='/sessions/{session.session_id}']")
        page.until("location.pathname.startsWith('/sessions/')")
        page.evaluate("window.same = true")
        code = "print('line', 1)\nwait_for_viewer()\nprint('line', 2)\n1 / 0"
        run: Future[Any] = pool.submit(session.execute, code)
        assert page.shows("line 1") and page.shows("wait_for_viewer()")
        assert not run.done() and "line 2" not in page.text()
        seen.set()
        assert run.result().outcome is Outcome.EXCEPTION
        assert page.shows("line 2") and page.shows("ZeroDivisionError")
    assert page.shows("Ended at") and page.shows("the session was deleted")
    assert page.evaluate("window.same")
    page.open(f"{console.url}/sessions?state=ended")
    assert page.shows("watched") and page.shows("the session was deleted")


def test_a_step_goes_on_when_somebody_approves_with_the_keyboard_alone(
    console: Console, client: ExecutorClient, page: Page, pool: ThreadPoolExecutor
) -> None:
    page.open(f"{console.url}/approvals")
    assert page.shows("Nothing waits")
    page.evaluate("window.same = true")
    with client.create_session() as session:
        session.register_tools({"send_report": send_report})
        run: Future[Any] = pool.submit(session.execute, SENDS)
        assert page.shows("send_report")
        assert page.evaluate("window.same") and not run.done()
        tab_to(page, "main a[href^='/approvals/']")
        page.press("Enter")
        assert page.shows("the draft") and page.shows("profiles.agents.tools.ask")
        tab_to(page, "button[value=once]")
        page.press("Enter")
        assert run.result().output == "sent the draft"
        assert page.shows("Approved once")


def test_an_agent_reads_a_denial_and_works_around_it(
    console: Console, daemon: Daemon, page: Page, pool: ThreadPoolExecutor
) -> None:
    from smolagents import tool

    page.open(f"{console.url}/approvals")
    assert page.shows("Nothing waits")
    replies = (SENDS, Reply("", "final_answer('kept as a draft')", expects=["the approver refused it"]))
    with agent_on(daemon, *replies, tools=[tool(send_report)]) as agent:
        run = pool.submit(agent.run, "Send the report.")
        page.click("main a[href^='/approvals/']")
        page.click("button[value=deny]")
        assert run.result() == "kept as a draft"
    assert page.shows("Denied")


def test_a_refusal_names_the_line_of_the_policy(console: Console, client: ExecutorClient, page: Page) -> None:
    with pytest.raises(PolicyViolationError):
        client.create_session(limits={"wall_time_s": 3600})
    page.open(f"{console.url}/refusals")
    assert page.shows("profiles.agents.limits.max.wall_time_s") and page.shows("3,600")


def test_an_action_of_a_viewer_is_refused(daemon: Daemon, client: ExecutorClient, chromium: Browser) -> None:
    directory = daemon.state_dir.parent / "viewer"
    directory.mkdir(mode=0o700)
    token_file = directory / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(daemon.new_token("local", "viewer"))
    places = ("--state-dir", str(directory), "--daemon", daemon.address, "--token-file", str(token_file))
    with (
        client.create_session() as session,
        running_console(daemon, *places, "--actions") as console,
        signed_in(chromium, console.first_link) as page,
    ):
        page.open(f"{console.url}/actions/end?session={session.session_id}")
        page.click("form[action='/actions/end'] button")
        assert page.shows("Forbidden") and page.shows("admin")
        assert session.execute("1 + 1").output == 2


@pytest.fixture
def busy(client: ExecutorClient, pool: ThreadPoolExecutor, page: Page) -> Iterator[str]:
    """The id of a session with wide output, an image and a long table, which waits for an approval."""
    with client.create_session(name="n" * 60, labels={"k" * 20: "v" * 40}) as session:
        session.register_tools({"send_report": send_report})
        session.execute("print('wide ' * 200, 'x' * 2000)\nopen('f' * 200, 'w').close()\n[0] * 5000")
        run: Future[Any] = pool.submit(session.execute, SENDS)
        page.open(page.evaluate("location.origin") + "/approvals")
        page.until("!!document.querySelector('main a[href^=\"/approvals/\"]')")
        yield session.session_id
        session.close()
        run.exception()


def test_every_page_fits_a_phone_and_400_percent_and_has_contrast(console: Console, page: Page, busy: str) -> None:
    approval = page.evaluate("document.querySelector('main a[href^=\"/approvals/\"]').pathname")
    for path in (*PAGES, f"/sessions/{busy}", approval, f"/actions/end?session={busy}"):
        page.resize(1280, 800)
        page.open(f"{console.url}{path}")
        assert page.evaluate("document.querySelectorAll('main').length + document.querySelectorAll('h1').length") == 2
        unnamed = "[...document.querySelectorAll('a, button, input:not([type=hidden]), select, textarea')]"
        unnamed += (
            ".filter(each => !(each.textContent + (each.ariaLabel ?? '') + [...each.labels ?? []].length).trim())"
        )
        assert page.evaluate(f"{unnamed}.map(each => each.outerHTML)") == [], path
        for dark in (False, True):
            page.media(dark=dark)
            ratio, element = page.evaluate(CONTRAST)
            assert ratio >= 4.5, (path, dark, ratio, element)
        for width, height in ((390, 844), (320, 256)):  # a phone; a window of 1280 by 1024 pixels at 400 %
            page.resize(width, height)
            assert page.evaluate("document.scrollingElement.scrollWidth - innerWidth") <= 0, (path, width)


def test_the_tab_key_reaches_everything_and_shows_where_it_is(console: Console, page: Page, busy: str) -> None:
    for path in ("/", f"/sessions/{busy}", "/policy"):
        page.open(f"{console.url}{path}")
        page.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
        reached = focusable = 0
        focusable = page.evaluate(
            "[...document.querySelectorAll('a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex=\"0\"]')]"
            ".filter(each => each.checkVisibility()).length"
        )
        while page.evaluate("document.activeElement !== document.body") and reached <= focusable:
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", page.evaluate("document.activeElement.outerHTML.slice(0, 200)")
            reached += 1
            page.press("Tab")
        assert reached == focusable, path
    page.open(f"{console.url}/policy")
    page.press("Tab")
    page.press("Enter")
    page.press("Tab")
    assert eventually(lambda: page.evaluate("!!document.activeElement.closest('main')"))


def tab_to(page: Page, selector: str) -> None:
    """Presses Tab until an element has the focus, as a person without a mouse does."""
    page.until(f"!!document.querySelector({json.dumps(selector)})")
    for _ in range(60):
        page.press("Tab")
        if page.evaluate(f"document.activeElement.matches({json.dumps(selector)})"):
            return
    pytest.fail(f"Tab does not reach {selector}")
