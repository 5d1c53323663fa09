"""A real Chromium of any version, driven over two pipes, as clients/typescript/test/programs.ts drives one.

A test asks with `running_chromium()`. Where there is none it is skipped, with the reason; where REQUIRED_TOOLS names
chromium, as .ci/run does, it fails instead.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.polling import eventually

ANSWER_TIMEOUT_S = 60.0
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--disable-breakpad",
)
# It resolves nothing but what these tests serve: a page that a test opens reaches no other host.
OFFLINE = ("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost", "--no-proxy-server")
# Names of keys to what the browser wants to be told about them; other keys are their own letter.
KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Space": 32, "ArrowDown": 40, "ArrowUp": 38}
_NEW_DESCRIPTORS = 10  # above those that the browser gets as 3 and 4


class PageError(Exception):
    """The browser could not do what it was asked for, or the expression raised an error."""


class Browser:
    """A browser that runs. Each page has a profile of its own: cookies of one are not seen by another."""

    def __init__(self, program: str, profile: Path) -> None:
        from_browser, to_us = _pipe()
        from_us, to_browser = _pipe()
        flags = [*FLAGS, *OFFLINE, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        # The shell makes them 3 and 4, the descriptors that the browser uses.
        move = f'exec "$@" 3<&{from_us} 4>&{to_us}'
        self.process = subprocess.Popen(
            ["bash", "-c", move, "bash", program, *flags],
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "HOME": str(profile), "TMPDIR": str(profile), "XDG_CONFIG_HOME": str(profile)},
        )
        os.close(from_us)
        os.close(to_us)
        self._write, self._read = to_browser, from_browser
        self._rest = b""
        self._ids = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        self.send("Browser.getVersion")  # it answers when all its processes that last are there

    def send(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Asks for one thing, and returns its result. Events that arrive meanwhile are kept in `events`."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params or {}}
        data = json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while True:
            answer = None
            for each in self._messages(deadline):
                if "id" not in each:
                    self.events.append(each)
                elif each["id"] == number:
                    answer = each
            if answer is None:
                continue
            if "error" in answer:
                raise PageError(f"{method}: {answer['error']['message']}")
            return dict(answer["result"])

    @contextmanager
    def page(self, *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1) -> Iterator[Page]:
        """A page without cookies. `width` and `height` are in CSS pixels, `scale` is the number of pixels for each."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.send(f"{domain}.enable")
        page.resize(width, height, scale=scale)
        page.media(dark=dark)
        try:
            yield page
        finally:
            page.send("Page.stopLoading")  # while a page is being replaced, the next call may never be answered
            self.send("Target.disposeBrowserContext", {"browserContextId": context})

    def close(self) -> None:
        with contextlib.suppress(PageError, OSError):
            self.send("Browser.close")
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # its other processes, which still write to the profile
        self.process.wait()

    def _messages(self, deadline: float) -> list[dict[str, Any]]:
        """The next messages that arrived whole."""
        ready, _, _ = select.select([self._read], [], [], max(deadline - time.monotonic(), 0))
        if not ready:
            raise PageError(f"the browser did not answer within {ANSWER_TIMEOUT_S:g} s")
        if not (data := os.read(self._read, 1 << 20)):
            raise PageError("the browser has ended")
        *whole, self._rest = (self._rest + data).split(b"\0")
        return [json.loads(each) for each in whole]


class Page:
    """A page in a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def send(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.send(method, params, self._session)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of what this page reported so far, for example each "Network.requestWillBeSent"."""
        self.send("Runtime.evaluate", {"expression": "0"})  # what was reported before has arrived then
        mine = [event for event in self._browser.events if event.get("sessionId") == self._session]
        return [event["params"] for event in mine if event["method"] in methods]

    def open(self, url: str) -> None:
        """Goes to a page and waits until it is there; what goes on loading is not waited for."""
        if error := self.send("Page.navigate", {"url": url}).get("errorText"):
            raise PageError(f"{url}: {error}")
        self.until('location.href !== "about:blank" && document.readyState !== "loading"')

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page. Promises are awaited."""
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", params)
        if details := answer.get("exceptionDetails"):
            raise PageError(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    def until(self, expression: str) -> Any:
        """The first true value of an expression, asked again and again; fails after a while."""

        def look() -> Any:
            try:
                return self.evaluate(expression)
            except PageError as error:  # the page is being replaced by another one
                if "context" not in str(error) and "navigated" not in str(error):
                    raise
                return None

        value = eventually(look)
        assert value, f"not so: {expression}; the page says:\n{self.text()[:4000]}"
        return value

    def text(self) -> str:
        """What a person can read in it."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def shows(self, text: str) -> bool:
        """Waits until the page has this text."""
        return bool(self.until(f"document.body && document.body.innerText.includes({json.dumps(text)})"))

    def click(self, selector: str) -> None:
        """Clicks an element once it is there and a mouse would hit its middle.

        The page does all of it in one turn: elements may move between a look and an event of the mouse.
        """
        self.until(
            f"""(() => {{
                const element = document.querySelector({json.dumps(selector)});
                if (element === null) return false;
                element.scrollIntoView({{block: "center", behavior: "instant"}});
                const box = element.getBoundingClientRect();
                const hit = document.elementFromPoint(box.x + box.width / 2, box.y + box.height / 2);
                if (!element.contains(hit)) return false;
                element.focus();
                element.click();
                return true;
            }})()"""
        )

    def press(self, key: str) -> None:
        """Presses a key, as "Tab"."""
        code = KEYS.get(key) or ord(key.upper())
        text = {"Enter": "\r", "Space": " "}.get(key, key if len(key) == 1 else "")
        common = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", {"type": "keyDown" if text else "rawKeyDown", "text": text, **common})
        self.send("Input.dispatchKeyEvent", {"type": "keyUp", **common})

    def type(self, text: str) -> None:
        """Types into what has the focus."""
        self.send("Input.insertText", {"text": text})

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Changes the size, in CSS pixels. At a zoom of 400 % a window of 1280 pixels has 320 of them, each 4 wide."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", metrics)

    def media(self, *, dark: bool) -> None:
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.send("Emulation.setEmulatedMedia", {"features": features})

    def screenshot(self) -> bytes:
        """What is in the window, as PNG."""
        return base64.b64decode(self.send("Page.captureScreenshot", {"format": "png"})["data"])


def find_chromium() -> str | None:
    """The path of a Chromium, of any version."""
    named = os.environ.get("CHROMIUM")
    found = (shutil.which(name) for name in (named, "chromium", "chromium-browser", "google-chrome") if name)
    return next((path for path in found if path), None)


def require_chromium() -> str:
    """Skips the test, or fails it, where there is no Chromium."""
    if program := find_chromium():
        return program
    if "chromium" in os.environ.get("REQUIRED_TOOLS", "").split(","):
        pytest.fail("chromium is required here, but there is none", pytrace=False)
    pytest.skip("there is no chromium here; install it, or name one in $CHROMIUM")


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser without a window; at the end none of its processes and files is left."""
    program = require_chromium()
    profile = Path(tempfile.mkdtemp(prefix="chromium-"))
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
        assert eventually(lambda: _removed(profile))


def _removed(profile: Path) -> bool:
    shutil.rmtree(profile, ignore_errors=True)
    return not profile.exists()


def _pipe() -> tuple[int, int]:
    """A pipe whose descriptors are not among the first ones."""
    ends = os.pipe()
    moved = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _NEW_DESCRIPTORS) for end in ends)
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
