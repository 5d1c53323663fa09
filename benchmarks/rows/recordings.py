"""The cost of a recording: the time that it adds to `1+1`, and its file compared with the messages themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from executor_api.recordings import payload_of
from executor_client import Recording, Session

_ROUNDS = 1_000
_PROGRAMS = (
    "1+1",
    "for number in range(1000):\n    print('line', number)",
    "import random\nrandom.Random(1).randbytes(100_000)",
    "[look_up(number) for number in range(50)]",
    "1/0",
)


def recordings(bench: Bench) -> Iterator[Figure]:
    """`1+1` in two sessions in turns, one of them recorded; then a session with prints, tools, errors and noise."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.rxr"
        with bench.local.cold_session() as plain, bench.local.cold_session() as recorded:
            recorded.record(path)
            recorded_ms, plain_ms = bench.in_turns(
                _ROUNDS, lambda: timed(lambda: _add(recorded)), lambda: timed(lambda: _add(plain))
            )
        yield Figure("1+1, recorded", "ms", recorded_ms, Reference("not recorded", plain_ms), AtMostTimes(1.05))
        with bench.local.cold_session("random") as session, session.record(path):
            session.register_tools({"look_up": lambda number: {"number": number}})
            for program in _PROGRAMS:
                session.execute(program)
        file_kb, sent_kb = path.stat().st_size / 1e3, _sent_bytes(path) / 1e3
        yield Figure("file of a recording", "KB", (file_kb,), Reference("its messages", (sent_kb,)), AtMostTimes(1.15))


def daemon_recordings(bench: Bench) -> Iterator[Figure]:
    """The same for recordings that the daemon makes: sessions of two daemons in turns, one of which records."""
    with bench.local.cold_session() as plain, bench.recording.cold_session() as recorded:
        recorded_ms, plain_ms = bench.in_turns(
            _ROUNDS, lambda: timed(lambda: _add(recorded)), lambda: timed(lambda: _add(plain))
        )
    yield Figure(
        "1+1, recorded by the daemon", "ms", recorded_ms, Reference("not recorded", plain_ms), AtMostTimes(1.05)
    )
    with tempfile.TemporaryDirectory() as directory, bench.recording.cold_session("random") as session:
        path = Path(directory) / "run.rxr"
        session.register_tools({"look_up": lambda number: {"number": number}})
        for program in _PROGRAMS:
            session.execute(program)
        bench.recording.client.get_recording(session.session_id, path)
        sent_kb = _sent_bytes(path) / 1e3
        (kept,) = [each for each in bench.recording.client.list_recordings() if each.session_id == session.session_id]
        sizes = (("file of it", path.stat().st_size), ("files of it in the daemon", kept.size_bytes))
    for name, size_bytes in sizes:
        figure = (size_bytes / 1e3,)
        yield Figure(
            f"recording by the daemon: {name}", "KB", figure, Reference("its messages", (sent_kb,)), AtMostTimes(1.15)
        )


def _add(session: Session) -> None:
    assert session.execute("1+1").output == 2


def _sent_bytes(path: Path) -> int:
    """Returns the bytes of requests, events and answers on the wire."""
    with Recording(path) as recording:
        total = 0
        for entry in recording.entries():
            if entry.kind in ("execute", "event", "answer"):
                message = entry.message()
                total += message.ByteSize()
                payload = payload_of(message) if entry.kind == "event" else None
                total += payload.blob.size_bytes if payload is not None else 0
        return total
