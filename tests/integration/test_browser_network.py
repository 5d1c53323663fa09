"""Chromium in a sandbox whose hosts' TLS the egress proxy terminates, and others: what it trusts, and what it asks for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_client.smolagents import RemoteExecutor
from executor_client.smolagents.browser import BROWSER_IMPORTS, browser_settings
from tests.support.backends import require_image
from tests.support.daemon import daemon_of
from tests.support.internet.world import SUFFIX, Internet

LIMITS = {"wall_time_s": 60.0, "operations": 10**12}
SITE, TERMINATED, UNKNOWN = f"www.{SUFFIX}", f"guarded.www.{SUFFIX}", f"unknown.{SUFFIX}"
POLICY = f"""
default = "browsers"
[profiles.browsers.network]
default = ["{SITE}", "{TERMINATED}", "{UNKNOWN}"]
[[profiles.browsers.network.secrets]]
host = "{TERMINATED}"
header = "Authorization"
value = "Bearer ${{bot}}"
"""


@pytest.fixture(scope="module")
def browser(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RemoteExecutor]:
    require_image("browser")
    internet.names.address(TERMINATED, internet.address)
    token: Path = tmp_path_factory.mktemp("secrets") / "token"
    with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write("of-the-test")
    config = f'[pool]\nsize = 0\n{internet.config()}\n[egress.secrets]\nbot = "{token}"\n'
    with (
        daemon_of(config, "--backend", "docker", policy=POLICY) as daemon,
        RemoteExecutor([*BROWSER_IMPORTS, "time"], **browser_settings(limits=LIMITS), **daemon.access) as executor,
    ):
        executor("0")  # a sandbox that a test makes would be its leftover
        yield executor


def test_a_page_is_shown_whether_the_proxy_terminates_its_tls_or_not(
    browser: RemoteExecutor, internet: Internet
) -> None:
    for host, sent in ((SITE, []), (TERMINATED, ["Bearer of-the-test"])):
        assert browser(f"go_to('https://{host}/')\nget_driver().title").output == "First page"
        (request,) = (each for each in internet.sites.seen(host) if each.path == "/")
        assert request.values("authorization") == sent


def test_nothing_is_asked_for_that_no_page_asked_for_and_no_file_appears(browser: RemoteExecutor) -> None:
    result = browser(f"go_to('https://{SITE}/second')\nimport time\ntime.sleep(5)\nget_driver().title")
    assert (result.output, result.logs.strip()) == ("Second page", "")


def test_a_certificate_of_a_stranger_is_not_trusted(browser: RemoteExecutor) -> None:
    assert browser(f"go_to('https://{UNKNOWN}/')\nget_driver().title").output == "Privacy error"
    assert "ERR_CERT_AUTHORITY_INVALID" in browser("get_driver().page_source").output
