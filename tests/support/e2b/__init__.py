"""A double of E2B's cloud, whose sandboxes are real ones of this host.

    async with Double() as double:
        sandbox = await AsyncSandbox.create(api_key=double.api_key, api_url=double.url, sandbox_url=double.url)

It plays what our own gateway does not: machines with a root, in which our backend starts its guest, pauses, and the
faults of a cloud. The gateway answers the same requests (tests/gateway/test_e2b_circle.py).

`Double` lives in the event loop that enters it, `ThreadedDouble` in a thread with one of its own; `python -m
tests.support.e2b` is a process. It needs root, for users that are mapped into a sandbox.
"""

from __future__ import annotations

import os
from typing import Any

from executor_server.core.config.backend_config import E2BSection
from tests.support.e2b.faults import Fault, Kind, Request, Storm
from tests.support.e2b.server import Double, DoubleSandbox, Template
from tests.support.e2b.threaded import ThreadedDouble

__all__ = ["Double", "DoubleSandbox", "Fault", "Kind", "Request", "Storm", "Template", "ThreadedDouble", "e2b_section"]

WHY_NOT = None if os.geteuid() == 0 else "the double of E2B's cloud maps users into its sandboxes, which takes root"
"""The reason why there can be no double on this host; None when there can."""


def e2b_section(double: Double | ThreadedDouble, **settings: Any) -> E2BSection:
    """The configuration that makes our backend use this double."""
    return E2BSection.model_validate(
        {"api_url": double.url, "sandbox_url": double.url, "api_key_file": str(double.api_key_file), **settings}
    )
