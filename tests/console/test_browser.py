"""What a person sees and does in a real Chromium: live pages, decisions, refusals; by keyboard, and at 400 % zoom."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from executor_client import ExecutorClient
from tests.support.backends import require
from tests.support.chromium import Browser, Page, running_chromium
from tests.support.console import Console
from tests.support.daemon import Daemon, daemon_of

CONFIG = "pool.size = 0\n"
POLICY = """\
default = "agents"

[profiles.agents]
audit.view = "content"
tools.ask = ["send_*"]
limits.max.wall_time_s = 60
approvals.wait_s = 60
"""


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
    with signed_in(console, chromium) as made:
        yield made


@contextmanager
def signed_in(console: Console, chromium: Browser) -> Iterator[Page]:
    """A page of a browser that has signed in by link, on the overview."""
    with chromium.page() as page:
        page.open(console.link())
        page.until("location.pathname === '/'")
        yield page


def test_a_link_signs_in_once_and_signing_out_ends_it(console: Console, chromium: Browser, page: Page) -> None:
    assert page.shows("Overview")
    with chromium.page() as stranger:
        stranger.open(f"{console.url}/")
        assert stranger.shows("You are not signed in")
    page.click("form[action='/sign-out'] button")
    assert page.shows("You are not signed in")
