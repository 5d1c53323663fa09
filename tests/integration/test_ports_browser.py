"""A page that an agent made and serves in its sandbox, looked at by Chromium through a forwarded port."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import docker
import PIL.Image
import pytest

from executor_client.smolagents import RemoteExecutor
from tests.support.backends import require_image
from tests.support.daemon import Daemon
from tests.support.polling import eventually

WIDTH, HEIGHT = 640, 480
GREEN, RED = (0, 128, 0), (255, 0, 0)

# Half of the page is drawn by a script, with what the server computes at each request.
SITE = """
import http.server, json

PAGE = b'''<!doctype html><title>Sales</title>
<style>body { margin: 0; background: rgb(0, 128, 0) } canvas { position: absolute; left: 320px }</style>
<h1 style="color: white; margin: 20px">Made by an agent</h1><canvas width=320 height=480></canvas>
<script>fetch("/color").then(answer => answer.json()).then(color => {
  const context = document.querySelector("canvas").getContext("2d")
  context.fillStyle = color; context.fillRect(0, 0, 320, 480)
})</script>'''

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps("rgb(255, 0, 0)").encode() if self.path == "/color" else PAGE
        self.send_response(200)
        self.send_header("Content-Type", "application/json" if self.path == "/color" else "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

server = http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
print("ready", flush=True)
server.serve_forever()
"""


@pytest.fixture
def executor(daemon: Daemon) -> Iterator[RemoteExecutor]:
    with RemoteExecutor(["json"], **daemon.access) as made:
        yield made


def test_chromium_shows_a_page_that_an_agent_serves(executor: RemoteExecutor, tmp_path: Path) -> None:
    require_image("browser")
    executor(f"open('site.py', 'w').write({SITE!r})")
    for _ in executor.session.processes.start(["python3", "site.py"]):
        break  # it has said that it is ready
    with executor.session.ports.forward(8000) as forward:
        assert eventually(lambda: is_whole(screenshot(forward.url), tmp_path / "page.png"))
        assert forward.connections >= 2


def is_whole(data: bytes, kept: Path) -> bool:
    """True if the picture shows what the page has and what its script has drawn. It is kept for who reads a failure."""
    kept.write_bytes(data)
    picture = PIL.Image.open(io.BytesIO(data)).convert("RGB")
    assert picture.size == (WIDTH, HEIGHT)
    heading = picture.crop((0, 0, WIDTH // 2, 80))
    has_heading = (255, 255, 255) in {color for _, color in heading.getcolors(1 << 16) or []}
    return has_heading and (picture.getpixel((10, 400)), picture.getpixel((600, 400))) == (GREEN, RED)


def screenshot(url: str) -> bytes:
    """Has a Chromium on this machine's own network show the page."""
    client = docker.from_env()
    command = [
        "-c",
        "chromium --headless --no-sandbox --disable-gpu --disable-dev-shm-usage --virtual-time-budget=10000 "
        # In base64, since the Engine's logs are text.
        f"--window-size={WIDTH},{HEIGHT} --screenshot=/tmp/page.png {url} >&2 && base64 /tmp/page.png",
    ]
    try:
        output = client.containers.run(
            "remote-executor/browser",
            command,
            entrypoint="/bin/sh",
            network_mode="host",
            remove=True,
            stderr=False,
            user="root",
        )
    finally:
        client.close()
    return base64.b64decode(output)
