"""A real daemon on any of the backends, with what the backend needs: images, or a cloud."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from examples.rented import double
from tests.support.backends import DOCKER_IMAGE, require
from tests.support.daemon import Daemon, daemon_of
from tests.support.fleet_daemon import fleet_daemon, wanted


@contextmanager
def daemon_on(backend: str, config: str = "", policy: str = "") -> Iterator[Daemon]:
    """A daemon whose default image has what the tests import. Skips the test where the backend cannot run here.

    It is the front of a fleet where the run of the tests asks for one (`fleet_daemon`).
    """
    require(backend)
    if wanted() and backend == "local":
        with fleet_daemon(config, policy=policy) as front:
            yield front
        return
    with ExitStack() as stack:
        if backend == "docker":
            config += f'\n[docker.images]\nbase = "{DOCKER_IMAGE}"\n'
        elif backend == "e2b":
            # A process of its own, whose sandboxes are none of the tests' children.
            environment = stack.enter_context(double())
            keys = {"api_url": environment["E2B_API_URL"], "sandbox_url": environment["E2B_SANDBOX_URL"]}
            stack.enter_context(pytest.MonkeyPatch.context()).setenv("E2B_API_KEY", environment["E2B_API_KEY"])
            config += "\n[e2b]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        yield stack.enter_context(daemon_of(config, "--backend", backend, policy=policy or None))
