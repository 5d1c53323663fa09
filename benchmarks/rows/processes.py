"""The cost of processes in a session: one that does nothing, a terminal's echo, and much output."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil

from benchmarks.bench import Bench
from benchmarks.figures import AtLeast, AtMost, AtMostTimes, Figure, Reference, timed
from benchmarks.rows.memory import MIB
from executor_client import Process, ProcessOutput, Session, TerminalSize

_ROUNDS = 200
_KEYS = 300
_OUTPUT_BYTES = 100_000_000
_OUTPUT_ROUNDS = 5
_PIECE_BYTES = 262_144
_ECHO_BYTES = 100
# Seconds in which a process without a reader prints many times as much as is kept of its output.
_UNREAD_TIME_S = 5.0

_INSIDE = """
import subprocess, time
start = time.perf_counter()
subprocess.run("true", shell=True)
(time.perf_counter() - start) * 1000
"""
_PRINTER = f"head -c {_OUTPUT_BYTES} /dev/zero"


def run(bench: Bench) -> Iterator[Figure]:
    """`true`, compared with the same by `subprocess.run` in the sandbox, timed there, plus an execution of `1+1`."""
    with bench.local.cold_session("subprocess") as session:
        took_ms, add_ms, inside_ms = bench.in_turns(
            _ROUNDS,
            lambda: timed(lambda: session.processes.run("true").check()),
            lambda: timed(lambda: session.execute("1+1")),
            lambda: _number(session, _INSIDE),
        )
    both_ms = tuple(add + inside for add, inside in zip(add_ms, inside_ms, strict=True))
    yield Figure("run true", "ms", took_ms, Reference("1+1, and subprocess.run inside", both_ms), AtMostTimes(1.5))


def _number(session: Session, program: str) -> float:
    result = session.execute(program)
    assert isinstance(result.output, float), result.error
    return result.output


def echo(bench: Bench) -> Iterator[Figure]:
    """A key pressed in a terminal, until its echo is back: two messages of the echo service are its reference."""
    with bench.local.cold_session() as session:
        process = session.processes.start(["cat"], pty=TerminalSize(80, 24))
        events = iter(process)

        def press() -> None:
            process.write("x")
            _next_output(events)

        key_ms, echo_ms = bench.in_turns(
            _KEYS, lambda: timed(press), lambda: timed(lambda: bench.echo.unary(bytes(_ECHO_BYTES)))
        )
        process.kill()
    yield Figure("a key's echo in a terminal", "ms", key_ms, Reference("echo, unary", echo_ms), AtMost(3))


def _next_output(events: Iterator[object]) -> ProcessOutput:
    while True:
        event = next(events)
        if isinstance(event, ProcessOutput):
            return event


def output(bench: Bench) -> Iterator[Figure]:
    """100 MB to a reader that keeps up, compared with as many bytes of the echo service; and the cost without one."""
    with bench.local.cold_session() as session:

        def ours() -> float:
            start = time.perf_counter()
            process = session.processes.start(_PRINTER)
            received = sum(len(event.data) for event in process if isinstance(event, ProcessOutput))
            assert received == _OUTPUT_BYTES
            return received / (time.perf_counter() - start) / 1e6

        def echoed() -> float:
            start = time.perf_counter()
            pieces = _OUTPUT_BYTES // _PIECE_BYTES
            received = sum(len(message) for message in bench.echo.stream(100, pieces, _PIECE_BYTES))
            return received / (time.perf_counter() - start) / 1e6

        ours_mb_s, echoed_mb_s = bench.in_turns(_OUTPUT_ROUNDS, ours, echoed, warm_up=1)
        reference = Reference("echo, 256 KiB pieces", echoed_mb_s)
        yield Figure("100 MB of output", "MB/s", ours_mb_s, reference, AtLeast(80))
        grown = (_growth(bench, session),)
        yield Figure("the daemon's growth by output without a reader", "MiB", grown, None, AtMost(32))


def _growth(bench: Bench, session: Session) -> float:
    daemon = psutil.Process(bench.local.daemon.pid)
    before = daemon.memory_info().rss
    process: Process = session.processes.start("yes")
    highest, ends_s = before, time.monotonic() + _UNREAD_TIME_S
    while time.monotonic() < ends_s:
        highest = max(highest, daemon.memory_info().rss)
        time.sleep(0.05)
    process.kill()
    return (highest - before) / MIB
