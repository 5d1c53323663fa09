"""The view that a probe has of a run, and the verdict that it makes of it.

A verdict is "yes", "no: why" or "differs: how", in the words of the table. Each is drawn from what happened. What a
probe has no words for becomes "unforeseen: ...", which is never right.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smolagents import ActionStep
from smolagents.agent_types import AgentType

from tests.features.places import Place

YES = "yes"

Probe = Callable[[Place], str]
PROBES: dict[str, Probe] = {}

REFUSED = "no: refused before the run"

NAMESPACE = str(Path("/proc/self/ns/pid").readlink())
"""The namespace of processes that the agent is in."""


def probe(function: Probe) -> Probe:
    """Puts a function into the table, under its name."""
    assert function.__name__ not in PROBES
    PROBES[function.__name__] = function
    return function


@dataclass(frozen=True)
class Seen:
    """One run. `answer` is None without a final answer of the code's."""

    answer: Any = None
    error: Exception | None = None
    steps: list[ActionStep] = field(default_factory=list)

    @property
    def said(self) -> str:
        """All that was said, to the model or to the caller."""
        parts = [f"{type(self.error).__name__}: {self.error}"] if self.error else []
        for step in self.steps:
            parts += [str(step.observations or ""), str(step.error or "")]
        return "\n".join(parts)


def run(agent: Any, task: str = "go", **options: Any) -> Seen:
    """Runs an agent once, to its end. What `run()` raises is seen, not passed on."""
    try:
        result = agent.run(task, return_full_result=True, **options)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is what the caller gets)
        return Seen(error=error, steps=steps_of(agent))
    return Seen(result.output if result.state == "success" else None, None, steps_of(agent))


def steps_of(agent: Any) -> list[ActionStep]:
    return [step for step in agent.memory.steps if isinstance(step, ActionStep)]


def seen(place: Place, *script: Any, run_options: Mapping[str, Any] | None = None, **options: Any) -> Seen:
    """Makes an agent and runs it once; what its making raises is seen too."""
    try:
        with place.agent(*script, **options) as agent:
            return run(agent, **(run_options or {}))
    except Exception as error:  # noqa: BLE001 (see above)
        return Seen(error=error)


def checked(what: Seen, right: Any, otherwise: Mapping[str, str] | None = None) -> str:
    """Yes when the answer is right (a value, or a question to it), else the words for the first text that was said."""
    if what.error is None and (right(what.answer) if callable(right) else _same(what.answer, right)):
        return YES
    for pattern, words in (otherwise or {}).items():
        if re.search(pattern, what.said):
            return words
    return unforeseen(what)


def unforeseen(what: Seen) -> str:
    return f"unforeseen: answered {what.answer!r}, said {what.said!r}"


def _same(one: Any, other: Any) -> bool:
    plain = one.to_raw() if isinstance(one, AgentType) else one  # smolagents gives text as its AgentText
    return type(plain) is type(other) and bool(plain == other)
