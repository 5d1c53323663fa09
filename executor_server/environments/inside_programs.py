"""The texts of the programs that run in workshops (inside/), with their arguments."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from typing import Any, Literal


def program(name: Literal["run_uv", "first_import"], task: dict[str, Any]) -> str:
    """Returns a program that calls `main` with this task."""
    return f"{_text_of(name)}\n\nmain(json.loads({json.dumps(task)!r}))\n"


@functools.cache
def _text_of(name: str) -> str:
    return (files(__package__) / "inside" / f"{name}.py").read_text()
