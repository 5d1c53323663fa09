"""`executor port-forward`: forwards local ports to ports of a session, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal

from executor_client.aio_ports import AsyncPortForward
from executor_client.aio_session import AsyncSession
from executor_client.cli import EXIT_REFUSED, EXIT_SUCCEEDED
from executor_client.cli.console import Console
from executor_client.cli.port_numbers import PortPair

_FAILURES_SHOWN_EVERY_S = 1.0
"""Seconds between checks for failed connections: a program that retries must not fill the screen."""


async def forward(session: AsyncSession, options: argparse.Namespace, console: Console) -> int:
    """Forwards the ports that the options name, all or none, until SIGINT or SIGTERM. Returns the exit code.

    Raises ExecutorClientError.
    """
    async with contextlib.AsyncExitStack() as stack:
        forwards: list[AsyncPortForward] = []
        for pair in options.ports:
            try:
                made = await session.ports.forward(pair.port, local_port=pair.local_port, host=pair.host)
            except OSError as error:
                console.fail(f"can't listen on {_address(pair)}: {error.strerror or error}")
                return EXIT_REFUSED
            forwards.append(await stack.enter_async_context(made))
        console.show_lines([f"{made.url} forwards to port {made.port} of the session" for made in forwards])
        console.remark("Ctrl-C ends it")
        await _until_signal(forwards, console)
        for made in forwards:
            plural = "" if made.connections == 1 else "s"
            console.remark(f"port {made.port}: {made.connections:,} connection{plural}")
    return EXIT_SUCCEEDED


def _address(pair: PortPair) -> str:
    return f"[{pair.host}]:{pair.local_port}" if ":" in pair.host else f"{pair.host}:{pair.local_port}"


async def _until_signal(forwards: list[AsyncPortForward], console: Console) -> None:
    """Shows each new connection failure until a signal arrives."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, ended.set)
    shown: dict[int, object] = {}
    try:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), _FAILURES_SHOWN_EVERY_S)
            for made in forwards:
                if made.last_error is not None and shown.get(id(made)) is not made.last_error:
                    shown[id(made)] = made.last_error
                    console.remark(f"port {made.port}: {made.last_error.message}")
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
