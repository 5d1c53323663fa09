"""Ten megabytes into the sandbox and out of it again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.bench import Bench
from benchmarks.figures import AtMost, Figure, Reference, timed

_BYTES = 10_000_000
_PIECE_BYTES = 262_144
_ROUNDS = 15


def array(bench: Bench) -> Iterator[Figure]:
    """In as a variable, out as a variable and as an output; compared with as many bytes in messages of 256 KiB."""
    sent = np.arange(_BYTES // 8, dtype=np.float64)
    pieces = [bytes(_PIECE_BYTES)] * -(-_BYTES // _PIECE_BYTES)

    with bench.local.cold_session("numpy") as session:

        def put() -> None:
            session.set_variables({"sent": sent})

        def get() -> None:
            assert session.get_variables(["sent"])["sent"].nbytes == _BYTES

        def output() -> None:
            value = session.evaluate("sent")
            assert isinstance(value, np.ndarray)
            assert value.nbytes == _BYTES

        put()
        in_ms, echo_in_ms, out_ms, echo_out_ms, output_ms = bench.in_turns(
            _ROUNDS,
            lambda: timed(put),
            lambda: timed(lambda: bench.echo.upload(iter(pieces))),
            lambda: timed(get),
            lambda: timed(lambda: list(bench.echo.stream(100, len(pieces), _PIECE_BYTES))),
            lambda: timed(output),
        )
    both_ms = tuple(map(sum, zip(in_ms, out_ms, strict=True)))
    echo_both_ms = tuple(map(sum, zip(echo_in_ms, echo_out_ms, strict=True)))
    yield Figure("10 MB array in", "ms", in_ms, Reference("echo, 256 KiB pieces", echo_in_ms))
    yield Figure("10 MB array out", "ms", out_ms, Reference("echo, 256 KiB pieces", echo_out_ms))
    yield Figure("10 MB array in + out", "ms", both_ms, Reference("echo, 256 KiB pieces", echo_both_ms), AtMost(40))
    yield Figure("10 MB array as an output", "ms", output_ms, Reference("echo, 256 KiB pieces", echo_out_ms))
