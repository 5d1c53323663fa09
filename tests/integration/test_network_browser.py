"""Chromium of the browser image in a sandbox with a network: it reaches what the policy names, and shows why not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_client.smolagents import RemoteExecutor
from executor_client.smolagents.browser import BROWSER_IMPORTS, browser_settings
from tests.support.backends import require_image
from tests.support.daemon import daemon_of
from tests.support.internet.world import SUFFIX, Internet
from tests.support.network import policy

LIMITS = {"wall_time_s": 60.0, "operations": 10**12}
SITE, OTHER = f"www.{SUFFIX}", f"files.{SUFFIX}"


@pytest.fixture(scope="module")
def browser(internet: Internet) -> Iterator[RemoteExecutor]:
    require_image("browser")
    config = f"[pool]\nsize = 0\n{internet.config()}"
    with (
        daemon_of(config, "--backend", "docker", policy=policy()) as daemon,
        RemoteExecutor(
            [*BROWSER_IMPORTS, "time"], **browser_settings(limits=LIMITS), network=[SITE], **daemon.access
        ) as executor,
    ):
        executor("1")  # its session is the module's, and not the first test's
        yield executor


def test_an_allowed_page_is_shown_and_its_links_lead_on(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.sites.requests)
    browser(f"go_to('http://{SITE}/')")
    page = browser.page()
    assert page is not None and page.url == f"http://{SITE}/"
    assert browser("click('Onwards')\nget_driver().title").output == "Second page"
    requests = [(each.host, each.path) for each in internet.sites.requests[before:] if each.path != "/favicon.ico"]
    assert requests == [(SITE, "/"), (SITE, "/second")]


def test_another_host_shows_the_reason_and_the_logs_have_it(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.sites.requests)
    result = browser(f"go_to('http://{OTHER}/hello.txt')\nget_driver().page_source")
    assert f"{OTHER}:80 is not allowed for this session" in result.output
    assert f"{OTHER}:80 is not allowed for this session" in result.logs
    assert [each for each in internet.sites.requests[before:] if each.host == OTHER] == []


def test_over_https_another_host_is_no_page_and_the_logs_have_the_reason(browser: RemoteExecutor) -> None:
    # Selenium raises, or the browser shows a page of its own, with the same code.
    result = browser(
        f"try:\n    go_to('https://{OTHER}/')\n    said = get_driver().page_source\n"
        "except Exception as error:\n    said = str(error)\nsaid"
    )
    assert "ERR_TUNNEL_CONNECTION_FAILED" in result.output
    assert f"{OTHER}:443 is not allowed for this session" in result.logs


def test_quic_and_name_look_ups_of_its_own_reach_nothing(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.names.questions)
    browser(f"go_to('http://{SITE}/')")
    asked = {question.name for question in internet.names.questions[before:]}
    assert asked <= {SITE}
