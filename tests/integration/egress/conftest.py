"""Every test of this folder runs on both loops that the proxy runs on: the daemon's, and that of a machine in the cloud."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.hookimpl(optionalhook=True)  # a newer pytest-asyncio has it
def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return LOOPS
