"""The exit codes of a supervisor that ends by itself. They show a backend why a sandbox has ended."""

from __future__ import annotations

ASKED = 0
BROKEN = 71
NO_INTERPRETER = 72
ORPHANED = 73

END_REASONS = {
    ASKED: "its daemon ended it",
    BROKEN: "its supervisor got a message that no daemon sends",
    NO_INTERPRETER: "no interpreter starts in it any more",
    ORPHANED: "its supervisor heard nothing of a daemon for its orphan time",
}
