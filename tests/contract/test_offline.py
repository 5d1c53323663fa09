"""A program that misses the network learns from the sandbox that there is none."""

from __future__ import annotations

import pytest

from executor_server.guest.checks.offline import NOTE
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
    assert run.message.endswith(f"\n{NOTE}")
    assert RAISED[name].splitlines()[1] in run.ended.error.traceback
    assert NOTE not in run.stderr, "once for each step"


async def test_a_program_that_catches_it_gets_the_explanation_once_in_its_logs(harness: Harness) -> None:
    session = await harness.session()
    code = (
        "import urllib.request\nfor _ in range(3):\n    try:\n        urllib.request.urlopen('https://pypi.org')\n"
        "    except OSError as error:\n        print(error)"
    )
    run = await harness.run(session, code)
    assert (run.outcome, run.stderr) == ("succeeded", f"{NOTE}\n")
    assert (await harness.run(session, "print('well')")).stderr == ""


async def test_a_child_that_misses_the_network_is_explained_too(harness: Harness) -> None:
    session = await harness.session()
    child = "import socket; socket.getaddrinfo('pypi.org', 443)"
    run = await harness.run(session, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])")
    assert run.stderr.endswith(f"{NOTE}\n") and "gaierror" in run.stderr


async def test_the_sandbox_s_own_addresses_are_no_network(harness: Harness) -> None:
    session = await harness.session()
    run = await harness.run(session, "import socket\nsocket.create_connection(('127.0.0.1', 9))")
    assert run.outcome == "exception"
    assert NOTE not in run.message + run.stderr
