"""Takes the pictures of docs/console.md: a daemon with sessions, its console, and a Chromium.

Look at them before you commit them: no test compares them.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import PIL.Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from executor_client import Outcome, Session
from tests.support.chromium import Browser, Page, running_chromium
from tests.support.console import Console, running_console
from tests.support.daemon import Daemon, daemon_of

OUT = Path(__file__).parents[1] / "docs" / "console"
COLORS = 192
WAIT_S = 65.0
"""Seconds until the lines of the overview have three points."""
POLICY = """\
version = "2026-11-27"
default = "agents"

[profiles.agents]
audit.view = "content"
imports.allowed = ["matplotlib.*", "numpy.*", "statistics", "time", "json"]
tools.ask = ["send_*"]
approvals.wait_s = 240

[profiles.agents.limits.max]
wall_time_s = 120

[profiles.agents.quotas]
sessions = 20
"""
LOAD = """\
import json
# revenue of each month, in thousands of euros
revenue = json.loads(open("revenue.json").read())
for month, value in revenue.items():
    print(f"{month:>4} {value:6.1f}")"""
CONVERT = """\
dollars = {month: convert(value, to="USD") for month, value in list(revenue.items())[:3]}
dollars"""
PLOT = """\
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6, 3))
axes.bar(list(revenue), list(revenue.values()), color="#3f74e0")
axes.set_ylabel("thousand euros")
figure.tight_layout()
plt.show()"""
WRONG = """\
best = max(revenue, key=lambda month: revenue[month])
print(f"best month: {best}, {revenu[best]}")"""
SEND = """\
report = f"The best month was {max(revenue, key=revenue.get)}."
send_report(to="board@example.com", text=report)"""
REVENUE = '{"Jan": 12.4, "Feb": 9.8, "Mar": 17.1, "Apr": 21.0, "May": 18.2, "Jun": 24.6}'


def main() -> None:
    OUT.mkdir(exist_ok=True)
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_of("pool.size = 2\n", policy=POLICY))
        console = stack.enter_context(running_console(daemon, "--actions"))
        chromium = stack.enter_context(running_chromium())
        client = stack.enter_context(daemon.client())
        history(daemon)
        session = stack.enter_context(
            client.create_session("base", ["json", "matplotlib.*"], name="revenue-report", labels={"agent": "analyst"})
        )
        with signed_in(console, chromium) as page:
            work(session)
            waiting = threading.Thread(target=session.execute, args=(SEND,))
            waiting.start()
            page.open(f"{console.url}/approvals")
            page.until("!!document.querySelector('main a[href^=\"/approvals/\"]')")
            time.sleep(WAIT_S)
            request = page.evaluate("document.querySelector('main a[href^=\"/approvals/\"]').pathname")
            session_path = f"/sessions/{session.session_id}"
            picture(page, console, "/", "overview")
            picture(page, console, session_path, "session", height=1240)
            picture(page, console, session_path, "session-phone", width=390, height=844)
            picture(page, console, request, "approval", dark=True)
            picture(page, console, "/sessions", "sessions", dark=True, height=560)
            picture(page, console, request, "approval-phone", dark=True, width=390, height=844)
            for name in sys.argv[1:]:
                picture(page, console, f"/{name}", f"_{name}")
            page.open(f"{console.url}{request}")
            page.click("button[value=once]")
            page.shows("Approved once")
            waiting.join()


def history(daemon: Daemon) -> None:
    """Sessions of other tenants, some ended, for the lists."""
    with daemon.client_of("research") as client:
        with client.create_session(name="survey", labels={"agent": "crawler"}) as session:
            session.execute("print('hello')")
        session = client.create_session(
            authorized_imports=["numpy"], labels={"agent": "crawler"}, limits={"memory_bytes": 256 << 20}
        )
        session.execute("import numpy\nnumpy.ones(1)")
        assert session.execute("x = bytearray(1 << 30)").outcome is not Outcome.SUCCEEDED
        session.close()
        client.create_session(name="notebook", detached=True).execute("import socket")


def work(session: Session) -> None:
    session.files.write("revenue.json", REVENUE.encode())
    session.register_tools({"convert": lambda value, to: round(value * 1.16, 2), "send_report": lambda to, text: to})
    for code in (LOAD, CONVERT, PLOT, WRONG):
        result = session.execute(code)
        assert result.error is None or code is WRONG, result


@contextmanager
def signed_in(console: Console, chromium: Browser) -> Iterator[Page]:
    with chromium.page(width=1280, height=860) as page:
        page.open(console.link())
        page.until("location.pathname === '/'")
        yield page


def picture(
    page: Page, console: Console, path: str, name: str, *, dark: bool = False, width: int = 1280, height: int = 860
) -> None:
    page.resize(width, height)
    page.media(dark=dark)
    page.open(f"{console.url}{path}")
    page.until("[...document.images].every(each => each.complete || each.getBoundingClientRect().top > innerHeight)")
    image = PIL.Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    colors = image.quantize(COLORS, PIL.Image.Quantize.MAXCOVERAGE, kmeans=1, dither=PIL.Image.Dither.NONE)
    colors.save(OUT / f"{name}.png", optimize=True)


if __name__ == "__main__":
    main()
