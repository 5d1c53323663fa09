"""A real daemon on any of the backends, with what the backend needs: images, or a cloud."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pytest

from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon, daemon_of

DOUBLE_STOP_TIMEOUT_S = 30.0


@contextmanager
def daemon_on(backend: str, config: str = "") -> Iterator[Daemon]:
    """A daemon whose default image has what the tests import. Skips the test where the backend cannot run here."""
    require(backend)
    with ExitStack() as stack:
        if backend == "docker":
            config += f'\n[docker.images]\nbase = "{DOCKER_IMAGE}"\n'
        elif backend == "e2b":
            double = stack.enter_context(double_process())
            keys = {"api_url": double["E2B_API_URL"], "sandbox_url": double["E2B_SANDBOX_URL"]}
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("E2B_API_KEY", double["E2B_API_KEY"])
            config += "\n[e2b]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        yield stack.enter_context(daemon_of(config, "--backend", backend))


@contextmanager
def double_process() -> Iterator[Mapping[str, str]]:
    """The double of E2B's cloud in a process of its own, whose sandboxes are none of the tests' children.

    Gives the environment variables by which the SDK finds it.
    """
    process = subprocess.Popen([sys.executable, "-m", "tests.support.e2b"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        environment: dict[str, str] = {}
        while (line := process.stdout.readline()).startswith("export "):
            name, _, value = shlex.split(line)[1].partition("=")
            environment[name] = value
        yield environment
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DOUBLE_STOP_TIMEOUT_S)
    assert process.returncode == 0
