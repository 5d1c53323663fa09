"""The end of a session's prelude, with stand-ins for what it reports to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from executor_server.guest.supervisor.prelude import Prelude


def test_a_failure_without_detail_is_reported_as_a_whole_sentence() -> None:
    """It ended with a colon, and nothing after it."""
    notices: list[str] = []
    results: Any = SimpleNamespace(notify=notices.append)
    nothing: Any = None
    Prelude(nothing, nothing, results).end("crashed", None)
    assert notices == ["the prelude ended as crashed\n"]
