"""The cost of a session's viewers for its users."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench import Bench, serving
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from benchmarks.viewers import watching
from executor_client import Session

_VIEWERS = 10
_TURNS = 10
_ROUNDS = 200
_POLICY = """\
default = "seen"
[profiles.seen]
audit.view = "content"
"""


def viewers(bench: Bench) -> Iterator[Figure]:
    """`1+1`, one after the other, in turns with ten viewers of its session and with none."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir="/tmp") as directory:
        policy = Path(directory) / "policy.toml"
        policy.write_text(_POLICY)
        settings = f"[policy]\nfile = {json.dumps(str(policy))}\n"
        samples: dict[int, list[float]] = {_VIEWERS: [], 0: []}
        with serving("local", settings) as served, served.client.create_session() as session:
            for _ in range(bench.rounds(_TURNS)):
                for count, taken in samples.items():
                    with watching(served.daemon, session.session_id, count):
                        taken += [timed(lambda: _add(session)) for _ in range(_ROUNDS)]
    reference = Reference("without viewers", tuple(samples[0]))
    figure = "1+1, its session watched by ten"
    yield Figure(figure, "ms", tuple(samples[_VIEWERS]), reference, AtMostTimes(1.05), by_p99=True)
    yield Figure(figure, "ms", tuple(samples[_VIEWERS]), reference)


def _add(session: Session) -> None:
    assert session.execute("1+1").output == 2
