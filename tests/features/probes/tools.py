"""Tools and managed agents."""

from __future__ import annotations

import functools
import os
import sqlite3
from typing import Any, Optional

import smolagents
from smolagents import Tool, tool

from tests.features.actor import Actor
from tests.features.observe import REFUSED, checked, probe, run, seen
from tests.features.places import Place, unwarned

INVALID = {"ValueError: .* validation failed": REFUSED}


@tool
def double(number: int) -> int:
    """Doubles.

    Args:
        number: any
    """
    return 2 * number


class Counter(Tool):
    """Adds to what it was made with, and needs nothing that its class does not have."""

    name = "add"
    description = "Adds."
    inputs = {"number": {"type": "integer", "description": "any"}}  # noqa: RUF012
    output_type = "integer"

    def __init__(self, start: int = 1) -> None:
        super().__init__()
        self.start = start

    def forward(self, number: int) -> int:
        return self.start + number


@probe
def tool_by_decorator(place: Place) -> str:
    return checked(seen(place, "final_answer(double(21))", tools=[double]), 42)


@probe
def tool_by_class(place: Place) -> str:
    return checked(seen(place, "final_answer(add(number=41))", tools=[Counter()]), 42)


@probe
def tool_with_arguments(place: Place) -> str:
    what = seen(place, "final_answer(add(number=2))", tools=[Counter(start=40)])
    return "no: it runs, made without them" if what.answer == 3 else checked(what, 42)


@probe
def tool_with_required_arguments(place: Place) -> str:
    class Required(Counter):
        def __init__(self, start: int) -> None:
            super().__init__(start)

    return checked(seen(place, "final_answer(add(number=2))", tools=[Required(40)]), 42, INVALID)


@probe
def tools_of_one_class(place: Place) -> str:
    one, other = Counter(10), Counter(20)
    other.name = "add_more"
    what = seen(place, "final_answer([add(number=1), add_more(number=1)])", tools=[one, other])
    return "no: each runs, made without arguments" if what.answer == [2, 2] else checked(what, [11, 21])


@probe
def tool_with_closure(place: Place) -> str:
    rates = {"CHF": 1.05}

    @tool
    def rate(currency: str) -> float:
        """Returns a rate.

        Args:
            currency: ISO code
        """
        return rates[currency]

    return checked(seen(place, "final_answer(rate('CHF'))", tools=[rate]), 1.05, INVALID)


@probe
def tool_with_setup(place: Place) -> str:
    class Lazy(Tool):
        name = "lazy"
        description = "Has a word."
        inputs: dict[str, Any] = {}  # noqa: RUF012
        output_type = "string"

        def setup(self) -> None:
            self.word = "loaded"
            self.is_initialized = True

        def forward(self) -> str:
            return self.word

    return checked(
        seen(place, "final_answer(lazy())", tools=[Lazy()]), "loaded", {"has no attribute 'word'": "no: never called"}
    )


@probe
def tool_with_optional_hint(place: Place) -> str:
    @tool
    def greet(name: Optional[str] = None) -> str:  # noqa: UP045 (as the guides write it)
        """Greets.

        Args:
            name: whom
        """
        return f"hello {name}"

    return checked(
        seen(place, "final_answer(greet())", tools=[greet]),
        "hello None",
        {"name 'Optional' is not defined": REFUSED},
    )


def shouting(function: Any) -> Any:
    """A decorator as one has it: everything about the function stays as it was."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs).upper()

    return call


@probe
def tool_with_second_decorator(place: Place) -> str:
    with unwarned():  # smolagents warns that its own executors may not run this

        @tool
        @shouting
        def greet(name: str) -> str:
            """Greets.

            Args:
                name: whom
            """
            return f"hello {name}"

    refused = {"^(SyntaxError|ValueError|OSError|IndentationError)": REFUSED, "SyntaxError": REFUSED}
    return checked(seen(place, "final_answer(greet('you'))", tools=[greet]), "HELLO YOU", refused)


@probe
def tool_with_connection(place: Place) -> str:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.execute("create table facts (fact text)")
    connection.execute("insert into facts values ('seen')")

    class Look(Tool):
        name = "look"
        description = "Reads a fact."
        inputs: dict[str, Any] = {}  # noqa: RUF012
        output_type = "string"

        def __init__(self, connection: sqlite3.Connection) -> None:
            super().__init__()
            self.connection = connection

        def forward(self) -> str:
            return str(self.connection.execute("select fact from facts").fetchone()[0])

    try:
        return checked(seen(place, "final_answer(look())", tools=[Look(connection)]), "seen", INVALID)
    finally:
        connection.close()


@probe
def tool_outside_the_sandbox(place: Place) -> str:
    """The tool reads what only the agent's process knows."""

    @tool
    def secret() -> str:
        """Knows something."""
        import os

        return os.environ.get("FEATURES_SECRET", "nothing")

    os.environ["FEATURES_SECRET"] = "here"
    try:
        what = seen(place, "final_answer(secret())", tools=[secret])
    finally:
        del os.environ["FEATURES_SECRET"]
    return "no: always in the sandbox" if what.answer == "nothing" else checked(what, "here")


@probe
def tool_errors(place: Place) -> str:
    @tool
    def fail() -> str:
        """Fails."""
        raise LookupError("why")

    code = "try:\n    fail()\nexcept LookupError as error:\n    caught = str(error)\nfinal_answer(caught)"
    return checked(seen(place, code, tools=[fail]), "why")


@probe
def tools_from_threads(place: Place) -> str:
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool:
    doubled = list(pool.map(double, range(20)))
final_answer(doubled)
"""
    allowed = ["concurrent.futures"]
    return checked(seen(place, code, tools=[double], additional_authorized_imports=allowed), [2 * n for n in range(20)])


@probe
def own_final_answer(place: Place) -> str:
    class Receipt(Tool):
        name = "final_answer"
        description = "Ends the run."
        inputs = {"answer": {"type": "any", "description": "the answer"}}  # noqa: RUF012
        output_type = "any"

        def forward(self, answer: Any) -> Any:
            return {"receipt for": answer}

    return checked(seen(place, "final_answer('x')", tools=[Receipt()]), {"receipt for": "x"})


@probe
def managed_agents(place: Place) -> str:
    """A worker on the same kind of executor as its manager."""
    with place.agent("final_answer(6 * 7)", name="worker", description="Works.") as worker:
        try:
            with place.agent("final_answer(worker('work'))", managed_agents=[worker], own=True) as manager:
                return checked(run(manager), _says_42)
        except Exception as error:  # noqa: BLE001 (the verdict is made of it)
            return REFUSED if "Managed agents are not yet supported" in str(error) else f"unforeseen: {error!r}"


@probe
def managed_agent_elsewhere(place: Place) -> str:
    """A manager with a worker whose code runs in the manager's own process, as one mixes them."""
    worker = smolagents.CodeAgent(
        tools=[], model=Actor.of("final_answer(6 * 7)"), name="worker", description="Works.", verbosity_level=-1
    )
    what = seen(place, "final_answer(worker('work'))", managed_agents=[worker])
    return checked(what, _says_42, INVALID)


def _says_42(answer: Any) -> bool:
    return isinstance(answer, str) and "42" in answer
