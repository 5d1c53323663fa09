"""Chromium in a sandbox with a network: the hosts that it reaches and is refused, its trust, and its own requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from executor_client.smolagents import RemoteExecutor
from executor_client.smolagents.browser import BROWSER_IMPORTS, browser_settings
from tests.support.backends import require_image
from tests.support.browser import see
from tests.support.daemon import Daemon, daemon_of
from tests.support.internet.world import SUFFIX, Internet
from tests.support.network import write_secret

LIMITS = {"wall_time_s": 60.0, "operations": 10**12}
SITE, TERMINATED, UNKNOWN = f"www.{SUFFIX}", f"guarded.www.{SUFFIX}", f"unknown.{SUFFIX}"
OTHER = f"files.{SUFFIX}"
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
def daemon(internet: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    require_image("browser")
    internet.names.address(TERMINATED, internet.address)
    token = write_secret(tmp_path_factory.mktemp("secrets") / "token", "of-the-test")
    config = f'[pool]\nsize = 0\n{internet.config()}\n[egress.secrets]\nbot = "{token}"\n'
    with daemon_of(config, "--backend", "docker", policy=POLICY) as running:
        yield running


def open_browser(daemon: Daemon) -> RemoteExecutor:
    return RemoteExecutor([*BROWSER_IMPORTS, "time"], **browser_settings(limits=LIMITS), **daemon.access)


@pytest.fixture(scope="module")
def browser(daemon: Daemon) -> Iterator[RemoteExecutor]:
    with open_browser(daemon) as executor:
        executor("0")  # a sandbox that a test makes would be its leftover
        yield executor


@pytest.fixture
def fresh(daemon: Daemon) -> Iterator[RemoteExecutor]:
    """A browser of the test's own: after its first page of an error, it leaves the page as it is at the next error, and
    its driver raises nothing."""
    with open_browser(daemon) as executor:
        yield executor


def test_a_page_is_shown_whether_the_proxy_terminates_its_tls_or_not(
    browser: RemoteExecutor, internet: Internet
) -> None:
    for host, sent in ((SITE, []), (TERMINATED, ["Bearer of-the-test"])):
        before = len(internet.sites.requests)
        assert see(browser, f"go_to('https://{host}/')", "get_driver().title", "First page").value == "First page"
        (request,) = (each for each in internet.sites.requests[before:] if (each.host, each.path) == (host, "/"))
        assert request.values("authorization") == sent


def test_nothing_is_asked_for_that_no_page_asked_for_and_no_file_appears(browser: RemoteExecutor) -> None:
    seen = see(
        browser, f"go_to('https://{SITE}/second')\nimport time\ntime.sleep(5)", "get_driver().title", "Second page"
    )
    assert (seen.value, seen.logs.strip()) == ("Second page", "")


def test_links_of_a_page_over_plain_http_lead_on(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.sites.requests)
    browser(f"go_to('http://{SITE}/')")
    page = browser.page()
    assert page is not None and page.url == f"http://{SITE}/"
    assert see(browser, "click('Onwards')", "get_driver().title", "Second page").value == "Second page"
    requests = [(each.host, each.path) for each in internet.sites.requests[before:] if each.path != "/favicon.ico"]
    assert requests == [(SITE, "/"), (SITE, "/second")]


def test_another_host_shows_the_reason_and_the_logs_have_it(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.sites.requests)
    reason = f"{OTHER}:80 is not allowed for this session"
    seen = see(browser, f"go_to('http://{OTHER}/hello.txt')", f"{reason!r} in get_driver().page_source", True)
    assert seen.value
    assert reason in seen.logs
    assert [each for each in internet.sites.requests[before:] if each.host == OTHER] == []


def test_over_https_another_host_is_not_reached_and_the_logs_have_the_reason(
    fresh: RemoteExecutor, internet: Internet
) -> None:
    before = len(internet.sites.requests)
    seen = see(fresh, attempt(f"https://{OTHER}/hello.txt"), "get_driver().current_url.startswith('https')", True)
    assert f"{OTHER}:443 is not allowed for this session" in seen.logs
    assert "hello from outside" not in fresh("get_driver().page_source").output
    assert [each for each in internet.sites.requests[before:] if each.host == OTHER] == []


def test_the_browser_looks_up_no_name_but_the_pages(browser: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.names.questions)
    browser(f"go_to('http://{SITE}/')")
    assert {question.name for question in internet.names.questions[before:]} <= {SITE}


def test_a_certificate_of_a_stranger_is_not_trusted(fresh: RemoteExecutor, internet: Internet) -> None:
    before = len(internet.sites.requests)
    error = "ERR_CERT_AUTHORITY_INVALID"
    assert see(fresh, attempt(f"https://{UNKNOWN}/"), f"{error!r} in raised + get_driver().page_source", True).value
    assert [each for each in internet.sites.requests[before:] if each.host == UNKNOWN] == []


def attempt(url: str) -> str:
    """Code that goes to a page of which it depends on the browser whether the driver raises its error or shows it."""
    return f"raised = ''\ntry:\n    go_to({url!r})\nexcept Exception as error:\n    raised = str(error)"
