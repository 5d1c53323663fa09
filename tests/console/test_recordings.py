"""Recordings on pages: those that the daemon made, and uploaded files, which may be anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.backends import require
from tests.support.console import Browser
from tests.support.daemon import Daemon, daemon_of

POLICY = """\
version = "7"
default = "recorded"
[profiles.recorded]
record.mode = "full"
"""


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("pool.size = 0\n", policy=POLICY) as running:
        yield running


def _upload(browser: Browser, data: bytes) -> httpx.Response:
    return browser.http.post("/recordings", data={"csrf": browser.csrf()}, files={"recording": ("run.rxr", data)})


def test_a_recording_is_shown_if_it_is_whole(daemon: Daemon, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "run.rxr"
    with daemon.client() as client, client.create_session() as session:
        session.record(path)
        session.register_tools({"weather": lambda city: f"sunny in {city}"})
        session.execute("print(weather('Paris'), '<script>alert(1)</script>\\x1b[31m\\u202e')")
        session_id = session.session_id
    shown = _upload(browser, path.read_bytes())
    assert shown.status_code == 200, shown.text
    kept = browser.get(f"/recordings/{session_id}")
    for page in (shown.text, kept):
        assert '<span class="builtin">print</span>' in page
        assert "sunny in Paris &lt;script&gt;" in page
        assert "<code>weather(&#39;Paris&#39;)</code>" in page
        assert not set("\x1b\u202e") & set(page)
    assert "Complete." in shown.text
    assert f'href="/recordings/{session_id}"' in browser.get("/recordings")
    edited = bytearray(path.read_bytes())
    edited[len(edited) // 2] ^= 1
    for data in (bytes(edited), path.read_bytes()[:-1], b"", b"PK\x03\x04" * 1000):
        refused = _upload(browser, data)
        assert refused.status_code == 400
        assert "can&#39;t be shown" in refused.text
