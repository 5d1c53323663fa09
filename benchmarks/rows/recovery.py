"""The time that a daemon takes to start, alone and with the sessions of one that was killed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from benchmarks.bench import Bench
from benchmarks.daemon import DaemonHome, daemon_home
from benchmarks.figures import Figure, Reference
from benchmarks.references import DOCKER_IMAGE, require_docker_image

_ROUNDS = 5
_SESSIONS = 8
_NO_POOL = "[pool]\nsize = 0\n"


def local(bench: Bench) -> Iterator[Figure]:
    """From the start of its process until it listens; afterwards each session has the variables that it had."""
    yield _starts(bench, "local")


def docker(bench: Bench) -> Iterator[Figure]:
    """The same on the Docker backend."""
    require_docker_image(DOCKER_IMAGE)
    yield _starts(bench, "docker")


def _starts(bench: Bench, backend: str) -> Figure:
    with ExitStack() as stack:
        full, empty = (stack.enter_context(daemon_home(backend, _NO_POOL)) for _ in range(2))
        with full.start().client() as client:
            session_ids = []
            for number in range(_SESSIONS):
                session = client.create_session()
                session.execute(f"number = {number}")
                session_ids.append(session.session_id)
        empty.start()
        full_ms, empty_ms = bench.in_turns(
            _ROUNDS, lambda: _restarted(full, session_ids), lambda: _restarted(empty, [])
        )
    reference = Reference("without sessions", empty_ms)
    return Figure(f"start after a kill, {_SESSIONS} sessions, {backend}", "ms", full_ms, reference)


def _restarted(home: DaemonHome, session_ids: list[str]) -> float:
    home.kill()
    daemon = home.start()
    with daemon.client() as client:
        for number, session_id in enumerate(session_ids):
            assert client.get_session(session_id).execute("number").output == number
    return daemon.start_s * 1000
