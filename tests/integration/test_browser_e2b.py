"""Chromium in a sandbox with a network on E2B: the double's machine has the files of the browser's image."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from executor_client.smolagents import RemoteExecutor
from executor_client.smolagents.browser import BROWSER_IMPORTS, browser_settings
from tests.support.backends import require, require_image
from tests.support.browser import see
from tests.support.daemon import daemon_of
from tests.support.internet.world import SUFFIX, Internet

pytest.importorskip("e2b")
pytest.importorskip("aiohttp")
from tests.support.e2b.server import Template
from tests.support.e2b.threaded import ThreadedDouble

# Where no control group limits memory, the size of a process's data is limited. A tab reserves more than it uses.
LIMITS = {"wall_time_s": 60.0, "operations": 10**12, "memory_bytes": 16 * 2**30}
SITE, OTHER = f"www.{SUFFIX}", f"files.{SUFFIX}"
POLICY = f"""
default = "browsers"
[profiles.browsers.network]
default = ["{SITE}"]
"""

# The image sets them; a sandbox in a machine of the cloud gets no variables of its template.
VARIABLES = """
import os
os.environ.update(SE_CHROMEDRIVER="/usr/bin/chromedriver", SE_OFFLINE="true", SE_AVOID_STATS="true")
"""


@pytest.fixture(scope="module")
def files_of_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of the browser's image, as files of this host."""
    require("e2b")
    require_image("browser")
    place = tmp_path_factory.mktemp("browser")
    command = ["tar", "--extract", "--directory", str(place), "usr", "etc", "bin", "sbin", "lib", "lib64"]
    with contextlib.closing(docker.APIClient()) as engine:
        container = engine.create_container("remote-executor/browser", command="true")["Id"]
        try:
            with subprocess.Popen(command, stdin=subprocess.PIPE) as unpacking:
                assert unpacking.stdin is not None
                for piece in engine.export(container):
                    unpacking.stdin.write(piece)
        finally:
            engine.remove_container(container)
    assert unpacking.returncode == 0
    return place


@pytest.fixture(scope="module")
def browser(internet: Internet, files_of_image: Path) -> Iterator[RemoteExecutor]:
    template = Template("chromium", root=files_of_image)
    with ThreadedDouble(outside=internet.addresses, templates=(template,)) as double:
        keys = {"api_url": double.url, "sandbox_url": double.url, "api_key_file": str(double.api_key_file)}
        section = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        config = f'[pool]\nsize = 0\n{internet.config()}\n[e2b]\n{section}images.browser = "chromium"\n'
        settings = browser_settings(limits=LIMITS)
        settings["prelude"] = VARIABLES + settings["prelude"]
        with (
            daemon_of(config, "--backend", "e2b", policy=POLICY) as daemon,
            RemoteExecutor([*BROWSER_IMPORTS, "os"], **settings, **daemon.access) as executor,
        ):
            executor("0")
            yield executor


def test_a_page_of_an_allowed_host_is_shown(browser: RemoteExecutor, internet: Internet) -> None:
    for scheme in ("https", "http"):
        before = len(internet.sites.requests)
        assert see(browser, f"go_to('{scheme}://{SITE}/')", "get_driver().title", "First page").value == "First page"
        assert see(browser, "click('Onwards')", "get_driver().title", "Second page").value == "Second page"
        requests = {(each.host, each.path) for each in internet.sites.requests[before:] if each.path != "/favicon.ico"}
        assert requests == {(SITE, "/"), (SITE, "/second")}


def test_another_host_is_refused_with_the_reason(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.sites.requests)
    reason = f"{OTHER}:80 is not allowed for this session"
    seen = see(browser, f"go_to('http://{OTHER}/hello.txt')", f"{reason!r} in get_driver().page_source", True)
    assert seen.value
    # Notices and answers take different streams: one may come a step late.
    assert reason in seen.logs + browser("1").logs
    assert [each for each in internet.sites.requests[before:] if each.host == OTHER] == []
