"""What E2B's protocol costs: calls of its SDK through the gateway, beside the same calls of our client."""

from __future__ import annotations

import time
from collections.abc import Iterator

from e2b_code_interpreter import Sandbox

from benchmarks.bench import Bench
from benchmarks.figures import AtMost, Figure, Reference, timed
from benchmarks.rows.sessions import warm_session

_ROUNDS = 100
_CREATIONS = 25
_FILES = 10
# Time for the pool to make another sandbox.
_REFILL_S = 0.2
_FILE_BYTES = 50_000_000


def e2b(bench: Bench) -> Iterator[Figure]:
    """A sandbox from the pool, a step, a command, and a file there and back."""
    access = {"api_key": bench.local.daemon.token, "api_url": bench.gateway, "sandbox_url": bench.gateway}

    def created() -> float:
        time.sleep(_REFILL_S)
        start = time.perf_counter()
        sandbox = Sandbox.create("base", **access)
        took_ms = (time.perf_counter() - start) * 1000
        sandbox.kill()
        return took_ms

    created_ms, warm_ms = bench.in_turns(_CREATIONS, created, lambda: warm_session(bench.local.client, _REFILL_S))
    yield Figure("E2B: create", "ms", created_ms, Reference("session ready, warm", warm_ms), AtMost(20))

    sandbox = Sandbox.create("base", **access)
    try:
        with bench.local.cold_session() as session:
            code_ms, execute_ms, command_ms, process_ms = bench.in_turns(
                _ROUNDS,
                lambda: timed(lambda: sandbox.run_code("1+1")),
                lambda: timed(lambda: session.execute("1+1")),
                lambda: timed(lambda: sandbox.commands.run("true")),
                lambda: timed(lambda: session.processes.run(["/bin/bash", "-l", "-c", "true"]).check()),
            )
            yield Figure('E2B: run_code("1+1")', "ms", code_ms, Reference("execute", execute_ms), AtMost(6))
            reference = Reference("processes.run, same shell", process_ms)
            yield Figure('E2B: commands.run("true")', "ms", command_ms, reference, AtMost(15))

            data = bytes(_FILE_BYTES)
            there_ms, put_ms, back_ms, get_ms = bench.in_turns(
                _FILES,
                lambda: timed(lambda: sandbox.files.write("large", data)),
                lambda: timed(lambda: session.files.write("large", data)),
                lambda: timed(lambda: sandbox.files.read("large", format="bytes")),
                lambda: timed(lambda: session.files.read("large")),
                warm_up=1,
            )
            yield Figure("E2B: write 50 MB", "ms", there_ms, Reference("files.write", put_ms), AtMost(1000))
            yield Figure("E2B: read 50 MB", "ms", back_ms, Reference("files.read", get_ms), AtMost(1000))
    finally:
        sandbox.kill()
