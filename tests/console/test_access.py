"""Who may use the console, and what every response says."""

from __future__ import annotations

import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.support.console import TIMEOUT_S, Browser, Console
from tests.support.fork_server import SERVER, popen
from tests.support.free_ports import free_port


def test_a_link_signs_in_once(console: Console) -> None:
    link = console.link()
    with httpx.Client(base_url=console.url, trust_env=False) as first, httpx.Client(trust_env=False) as second:
        answer = first.get(link)
        assert answer.status_code == 200
        assert {"HttpOnly", "SameSite=Strict"} <= set(answer.headers["set-cookie"].split("; "))
        assert first.get("/").status_code == 200
        assert second.get(link).status_code == 403
        assert second.get(f"{console.url}/").status_code == 401
    assert console.link() != link


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--listen", "0.0.0.0:1"], "Set console.tls_cert"),
        (["--listen", "0.0.0.0:1", "--tls-cert", "/none", "--tls-key", "/none"], "Set console.hosts"),
        (["--tls-cert", "/none"], "given together"),
        (["--daemon", "nowhere"], "write HOST:PORT"),
        (["--link"], "No console runs"),
    ],
)
def test_a_console_that_can_not_serve_says_why(tmp_path: Path, options: list[str], problem: str) -> None:
    command = [*SERVER, "console", "--state-dir", str(tmp_path / "s"), "--listen", f"127.0.0.1:{free_port()}", *options]
    with popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (3, 4)
    assert problem in output
    assert "Traceback" not in output


def test_every_response_forbids_scripts_frames_and_guessing(console: Console, browser: Browser) -> None:
    for answer in (
        browser.http.get("/"),
        browser.http.get("/nothing"),
        browser.http.get("/static/console.css"),
        httpx.get(f"{console.url}/", trust_env=False),
        browser.http.get("/", headers={"host": "attacker.example"}),
    ):
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("host", ["attacker.example", "127.0.0.1", "127.0.0.1:1", ""])
def test_another_host_header_is_refused(browser: Browser, host: str) -> None:
    """A page of an attacker whose name leads to 127.0.0.1 must not read the console."""
    assert browser.http.get("/", headers={"host": host}).status_code == 421


def test_a_form_needs_the_token_of_a_page_and_its_origin(browser: Browser) -> None:
    csrf = browser.csrf()
    assert browser.http.post("/sign-out", data={"csrf": "wrong"}).status_code == 403
    assert browser.http.post("/sign-out").status_code == 403
    foreign = browser.http.post("/sign-out", data={"csrf": csrf}, headers={"origin": "http://attacker.example"})
    assert foreign.status_code == 403
    assert browser.http.post("/sign-out", data={"csrf": csrf, "x": "x" * 100_000}).status_code == 413
    multipart = {"content-type": "multipart/form-data; boundary=b"}
    assert browser.http.post("/sign-out", content=b"no parts", headers=multipart).status_code in (400, 403)
    assert browser.http.post("/sign-out", content=b"--b\r\nx", headers=multipart).status_code in (400, 403)
    part = b'--b\r\nContent-Disposition: form-data; name="csrf"\r\n\r\n\\ud800\r\n--b--\r\n'
    half = {"content-type": f"{multipart['content-type']}; charset=raw_unicode_escape"}
    assert browser.http.post("/sign-out", content=part, headers=half).status_code == 403
    assert browser.http.post("/sign-out", json={"csrf": csrf}).status_code == 403
    assert browser.get("/")


def test_a_page_of_another_port_gets_nothing(browser: Browser) -> None:
    """It may be a sandbox's, at a forwarded port: browsers send it this host's cookies, and its requests have them."""
    fetch = {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}
    assert browser.http.get("/events", headers=fetch).status_code == 403
    assert browser.http.get("/", headers={**fetch, "sec-fetch-mode": "navigate"}).status_code == 200


def test_signing_out_ends_the_streams_of_the_browser(browser: Browser) -> None:
    csrf = browser.csrf()
    with browser.events("/events") as changes:
        next(changes)
        assert browser.http.post("/sign-out", data={"csrf": csrf}).status_code == 303
        assert list(changes)[-1] == ("close", "")
    assert browser.http.get("/").status_code == 401


def test_cookies_that_others_set_change_nothing(console: Console, browser: Browser) -> None:
    """A page of another port of this host can set some, also with the name of the console's."""
    ((name, value),) = browser.http.cookies.items()
    cookies = f'{name}=other; a="{chr(92) * 60_000}"; {name}={value}'
    began = time.monotonic()
    assert httpx.get(console.url, headers={"cookie": cookies}, trust_env=False).status_code == 200
    assert time.monotonic() - began < 5


def test_a_connection_that_sends_nothing_ends(console: Console) -> None:
    """Anyone who reaches the port can open as many as the console takes."""
    host, _, port = console.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        assert connection.recv(1) == b""
