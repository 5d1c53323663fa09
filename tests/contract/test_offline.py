"""A program that misses the network learns from the sandbox that there is none."""

from __future__ import annotations

import pytest

from executor_server.guest.checks.offline import NO_NETWORK
from tests.contract.harness import Harness
from tests.contract.marks import promise

pytestmark = promise("run-no-network")

RAISED = {
    "a name": "import urllib.request\nurllib.request.urlopen('https://pypi.org')",
    "an address": "import socket\nsocket.create_connection(('192.0.2.1', 80))",
}


@pytest.mark.parametrize("name", sorted(RAISED))
async def test_an_exception_says_that_there_is_no_network(harness: Harness, name: str) -> None:
    session = await harness.session()
    run = await harness.run(session, RAISED[name])
    assert run.outcome == "exception" and run.ended.error is not None
    assert run.message.endswith(f"\n{NO_NETWORK}")
    assert RAISED[name].splitlines()[1] in run.ended.error.traceback
    assert NO_NETWORK not in run.stderr, "once for each step"


async def test_a_program_that_catches_it_gets_the_explanation_once_in_its_logs(harness: Harness) -> None:
    session = await harness.session()
    code = (
        "import urllib.request\nfor _ in range(3):\n    try:\n        urllib.request.urlopen('https://pypi.org')\n"
        "    except OSError as error:\n        print(error)"
    )
    run = await harness.run(session, code)
    assert (run.outcome, run.stderr) == ("succeeded", f"{NO_NETWORK}\n")
    assert (await harness.run(session, "print('well')")).stderr == ""


async def test_a_child_that_misses_the_network_is_explained_too(harness: Harness) -> None:
    session = await harness.session()
    child = "import socket; socket.getaddrinfo('pypi.org', 443)"
    run = await harness.run(session, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    assert run.stderr.endswith(f"{NO_NETWORK}\n") and "gaierror" in run.stderr


async def test_the_sandbox_s_own_addresses_are_no_network(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "import socket\nsocket.create_connection(('127.0.0.1', 9))")
    assert run.outcome == "exception"
    assert NO_NETWORK not in run.message + run.stderr


@promise("egress-variables")
async def test_a_program_that_goes_around_the_proxy_learns_what_leads_out(harness: Harness) -> None:
    hosts = tuple(f"host{number}.test:443" for number in range(10, 30))
    session = await harness.session_under(f"network.allowed = {list(hosts)}", network=hosts)
    run = await harness.run(session, RAISED["an address"])
    listed = ", ".join([*hosts[:16], "and 4 more"])
    assert run.message.endswith(f"that http_proxy names; allowed: {listed}]") and NO_NETWORK not in run.message
    child = "import socket; socket.getaddrinfo('a.test', 1)"
    run = await harness.run(session, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    assert run.stderr.endswith(f"allowed: {listed}]\n") and "gaierror" in run.stderr
    await harness.change_policy(session, 'network.allowed = ["host11.test:443"]')
    assert (await harness.run(session, RAISED["an address"])).message.endswith("allowed: host11.test:443]")
