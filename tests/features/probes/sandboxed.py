"""Tools that run beside the code, in the sandbox."""

from __future__ import annotations

import threading
from typing import Any

from smolagents import Tool, tool

from tests.features.observe import REFUSED, Seen, checked, probe, seen, unforeseen
from tests.features.places import Docker, Ours, Place

ALWAYS_HERE = "no: always in the agent's process"


@tool
def whereabouts() -> str:
    """Returns the process that it runs in."""
    import os

    return f"{os.stat('/proc/self/ns/pid').st_ino} {os.getpid()}"  # noqa: PTH116 (its source travels)


@probe
def tool_in_the_sandbox(place: Place) -> str:
    """Asked for where that can be asked for: it runs in the process of the code, which is not the agent's."""
    options = {"executor_kwargs": {"tool_placement": {"whereabouts": "sandbox"}}} if isinstance(place, Ours) else {}
    code = "import os\nfinal_answer([whereabouts(), f\"{os.stat('/proc/self/ns/pid').st_ino} {os.getpid()}\"])"
    what = seen(place, code, tools=[whereabouts], additional_authorized_imports=["os"], **options)
    if isinstance(what.answer, list) and what.answer[0] == whereabouts():
        return "no: always in the agent's process"
    return checked(what, lambda answer: isinstance(answer, list) and answer[0] == answer[1])


def _sandboxed(place: Place, each: Tool, code: str) -> Seen | None:
    """A run with a tool that is to be in the sandbox; None where none can be."""
    if not isinstance(place, Docker | Ours):
        return None
    options = {"executor_kwargs": {"tool_placement": "sandbox"}} if isinstance(place, Ours) else {}
    return seen(place, code, tools=[each], **options)


class Till(Tool):
    """Needs what it was made with, and what its first use makes of that."""

    name = "till"
    description = "Adds up with the tax."
    inputs = {"price": {"type": "number", "description": "any"}}  # noqa: RUF012
    output_type = "number"

    def __init__(self, tax: float = 0.0) -> None:
        super().__init__()
        self.tax = tax
        self.total = 0.0

    def forward(self, price: float) -> float:
        self.total += price * (1 + self.tax)
        return self.total


@probe
def sandboxed_tool_with_state(place: Place) -> str:
    what = _sandboxed(place, Till(tax=0.5), "till(2)\nfinal_answer(till(4))")
    if what is None:
        return ALWAYS_HERE
    return "no: it runs, made without it" if what.answer == 6.0 else checked(what, 9.0)


@probe
def sandboxed_tool_with_closure(place: Place) -> str:
    rates = {"CHF": 1.05}

    def rate_of(currency: str) -> float:
        return rates[currency]

    @tool
    def convert(amount: float, currency: str) -> float:
        """Converts.

        Args:
            amount: any
            currency: ISO code
        """
        return amount * rate_of(currency)

    what = _sandboxed(place, convert, "final_answer(convert(2.0, 'CHF'))")
    return ALWAYS_HERE if what is None else checked(what, 2.1, {"ValueError: .* validation failed": REFUSED})


@probe
def sandboxed_tool_that_cannot_be(place: Place) -> str:
    """A tool that can't be shipped is refused before the run, by its name."""

    class Guarded(Tool):
        name = "guarded"
        description = "Holds a lock."
        inputs: dict[str, Any] = {}  # noqa: RUF012
        output_type = "string"

        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def forward(self) -> str:
            with self.lock:
                return "held"

    what = _sandboxed(place, Guarded(), "final_answer(guarded())")
    if what is None:
        return ALWAYS_HERE
    if what.error is None or what.steps:
        return unforeseen(what)
    return "yes" if "lock" in str(what.error) else "differs: it does not say what"
