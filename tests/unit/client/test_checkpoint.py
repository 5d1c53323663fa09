"""The repr of a checkpoint."""

from __future__ import annotations

from executor_client import Checkpoint, StateManifest
from executor_client._core.session_base import short_id

MANIFEST = StateManifest(
    variables=("a", "b"), omitted_variables={}, files=3, file_bytes=9, omitted_files={}, python_version="3.11"
)


def test_a_checkpoint_shows_itself_on_one_line_and_never_its_bytes() -> None:
    big = Checkpoint(b"\n" * 1_000_000, MANIFEST)
    shown = "<Checkpoint of 1000000 bytes: 2 variables, 3 files>"
    assert [repr(big), str(big), f"{big}", "{}".format(big)] == [shown] * 4  # noqa: UP032
    assert str(Checkpoint(b"x")) == "<Checkpoint of 1 bytes>"
    assert bytes(big)[:2] == b"\n\n"


def test_a_session_is_called_by_a_short_name() -> None:
    assert short_id("204256f953c3cf5beac6806b95f34519") == "204256f9"
    assert short_id("named-session") == "named-session"
    assert short_id("node-1-0000000153c3cf5beac6806b95f34519") == "node-1-0000000153c3cf5b"
    assert short_id("node-1-0000000153c3cf5beac6806b95f34519", 12) == "node-1-0000000153c3cf5beac6"
