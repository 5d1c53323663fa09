"""smolagents' tools of many shapes, each with expressions that call it; and those that can't leave this process."""

# The shapes are the users', who annotate some of their tools and not others.
# mypy: ignore-errors
# ruff: noqa: B006, PTH123, RUF012, SIM115, UP033, UP045

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import os
import re
import threading
import types
import warnings
from typing import Any, Optional

import numpy as np
import pandas as pd
import PIL.Image
import smolagents
from smolagents import Tool, tool
from smolagents import Tool as Base
from smolagents import tool as make_tool
from smolagents.agent_types import AgentImage
from smolagents.tools import PipelineTool

from examples.scripted import ScriptedModel
from tests.support.shipped import helpers
from tests.support.shipped.helpers import clean as cleaned
from tests.support.shipped.helpers import counted

RATES = {"eur": 2.0, "usd": 3.0}
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)
_LOCK = threading.Lock()


@tool
def convert(amount: float, to: Optional[str] = None) -> float:
    """Converts money.

    Args:
        amount: How much.
        to: Into which currency.
    """
    return amount * RATES[to or "eur"]


with warnings.catch_warnings():
    # smolagents expects such decorators to be lost on the way to its own remote executors.
    warnings.simplefilter("ignore")

    @make_tool
    def factorial(n: int) -> int:
        """Multiplies.

        Args:
            n: Up to this.
        """
        return 1 if n <= 1 else n * factorial(n - 1)

    @smolagents.tool
    def words(text: str, limit: int | None = None) -> list[str]:
        """Finds words.

        Args:
            text: Where.
            limit: How many.
        """
        text = (
            text
            + """
    and more"""
        )
        return [_lowered(each) for each in _WORD.findall(text)][:limit]

    @tool
    @counted
    def tried(x: int) -> tuple:
        """Has a decorator of the user's, too.

        Args:
            x: Any number.
        """
        return x + 1

    @tool
    @functools.lru_cache(maxsize=None)
    def remembered(x: int) -> int:
        """Has a decorator of Python's, too.

        Args:
            x: Any number.
        """
        return x * 2


def _lowered(text):
    return text.lower()


@tool
def priced(item: str) -> str:
    """Calls another tool.

    Args:
        item: Of what.
    """
    return f"{item}: {convert(len(item), to='usd')}"


def _make_scaled(factor, name):
    history = []

    @tool
    def scaled(x: int) -> list:
        """Scales.

        Args:
            x: Any number.
        """
        history.append(x * factor)
        return list(history)

    scaled.name = name
    return scaled


scaled_by_two = _make_scaled(2, "scaled_by_two")
scaled_by_ten = _make_scaled(10, "scaled_by_ten")
scaled_by_ten(1)


@tool
def collected(x: int, seen: list = []) -> list:
    """Keeps what it was given.

    Args:
        x: Any number.
        seen: What it was given.
    """
    seen.append(x)
    return seen


@tool
def tidied(text: str) -> str:
    """Uses another module of the user's.

    Args:
        text: Any.
    """
    return cleaned(text) + str(helpers.RATE)


@tool
def looked_up(key: str) -> int:
    """Fails for what it does not have.

    Args:
        key: One of a few.
    """
    return {"a": 1}[key]


@tool
def imported(n: int) -> list:
    """Imports what it needs.

    Args:
        n: How many.
    """
    import itertools
    from collections import Counter

    return list(itertools.islice(Counter("abc"), n))


class Asking(Base):
    name = "asking"
    description = "Asks."
    inputs = {"question": {"type": "string", "description": "What."}}
    output_type = "string"
    greeting = "hi"

    def __init__(self, key, endpoint="main", **kwargs):
        super().__init__(**kwargs)
        self.key = key
        self.endpoint = endpoint
        self.asked = 0

    def setup(self):
        self.connection = [self.key, self.endpoint]
        super().setup()

    def forward(self, question: str) -> str:
        self.asked += 1
        return f"{self.greeting} {question} {self.connection} {self.asked}"


Asking.greeting = "hello"
asking = Asking("k1")
asking_elsewhere = Asking("k2", endpoint="other")
asking_elsewhere("before")


class AskingTwice(Asking):
    name = "asking_twice"

    def forward(self, question: str) -> str:
        return " & ".join(super(AskingTwice, self).forward(part) for part in (question, question[::-1]))


@dataclasses.dataclass
class Settings:
    depth: int
    names: list[str] = dataclasses.field(default_factory=list)
    day: datetime.date = datetime.date(2026, 11, 21)


class Level(enum.Enum):
    LOW = 1
    HIGH = 2


class Configured(smolagents.Tool):
    name = "configured"
    description = "Has settings."
    inputs = {"level": {"type": "integer", "description": "1 or 2."}}
    output_type = "string"
    where = os.environ.get("A_VARIABLE_THAT_IS_NOWHERE", "nowhere")
    __secret = "s"

    def __init__(self):
        super().__init__()
        self.settings = Settings(3, ["a"])
        self.same = self.settings.names
        self.me = self

    @staticmethod
    def _depth(settings):
        return settings.depth

    @property
    def day(self):
        return self.settings.day.isoformat()

    def forward(self, level: int) -> str:
        self.same.append(self.__secret)
        assert self.me is self
        return f"{Level(level).name} {self._depth(self.settings)} {self.settings.names} {self.day} {self.where}"


class Calling(Tool):
    """Has a call of its own."""

    name = "calling"
    description = "Calls."
    inputs = {"x": {"type": "integer", "description": "Any."}}
    output_type = "integer"

    def forward(self, x: int) -> int:
        return x + 1

    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs) * 100


class Plain(Tool):
    name = "plain"
    description = "Adds."
    inputs = {"x": {"type": "integer", "description": "Any."}, "y": {"type": "integer", "description": "Any."}}
    output_type = "integer"

    def forward(self, x: int, y: int) -> int:
        return x + y


changed = Plain()
changed.forward = types.MethodType(lambda self, x, y: x * y, changed)


class Measuring(Tool):
    """Holds data of libraries."""

    name = "measuring"
    description = "Measures."
    inputs = {"column": {"type": "string", "description": "Of the table."}}
    output_type = "any"

    def __init__(self):
        super().__init__()
        self.table = pd.DataFrame({"a": [1, 2], "b": [0.5, None]})
        self.weights = np.array([2.0, 1.0])
        self.image = PIL.Image.new("RGB", (3, 2), "red")

    def forward(self, column: str) -> Any:
        total = float(np.nansum(self.table[column].to_numpy() * self.weights))
        return total, self.image.size, self.image.getpixel((0, 0)), self.table[column]


def _local_class(prefix):
    class Local(Tool):
        name = "local"
        description = "Is made in a function."
        inputs = {"x": {"type": "string", "description": "Any."}}
        output_type = "string"

        def forward(self, x: str) -> str:
            def inner():
                yield from (prefix, x)

            return "-".join(inner())

    return Local()


local = _local_class("p")


class Recording(Tool):
    name = "recording"
    description = "Has a state that leads back to itself."
    inputs = {"x": {"type": "string", "description": "Any."}}
    output_type = "any"

    def __init__(self):
        super().__init__()
        self.log = ["begin"]
        self.views = {"all": self.log, "again": [self.log]}
        self.log.append(self.views)

    def forward(self, x: str) -> Any:
        self.log.append(x)
        return (
            self.views["all"] is self.log,
            self.views["again"][0] is self.log,
            self.log[1] is self.views,
            len(self.log),
        )


class Raising(Tool):
    name = "raising"
    description = "Raises."
    inputs = {"x": {"type": "string", "description": "Any."}}
    output_type = "string"

    def forward(self, x: str) -> str:
        raise ValueError(f"not {x}")


class Located(Tool):
    """Needs nothing of its module, as smolagents asks of a tool that is saved."""

    name = "located"
    description = "Tells the number of its process."
    inputs = {"x": {"type": "integer", "description": "Any."}}
    output_type = "any"

    def __init__(self, more=3):
        super().__init__()
        self.more = more

    def setup(self):
        self.base = 100
        super().setup()

    def forward(self, x: int) -> Any:
        import os

        return os.getpid(), x + self.more + self.base


def _caught(call):
    return f"""
try:
    value = {call}
except Exception as error:
    value = type(error).__name__, str(error)
value
"""


CORPUS: dict[str, tuple[Any, str]] = {
    "convert": (convert, "[convert(3), convert(3, 'usd'), convert(amount=2, to='eur')]"),
    "convert_dict": (convert, "convert_dict({'amount': 4, 'to': 'usd'})"),
    "factorial": (factorial, "factorial(5)"),
    "words": (words, "[words('Ab c'), words('Ab c', limit=1)]"),
    "priced": (priced, "priced('abc')"),
    "tried": (tried, "[tried(1), tried(2)]"),
    "remembered": (remembered, "[remembered(2), remembered(2)]"),
    "scaled_by_two": (scaled_by_two, "[scaled_by_two(1), scaled_by_two(2)]"),
    "scaled_by_ten": (scaled_by_ten, "[scaled_by_ten(1), scaled_by_ten(2)]"),
    "collected": (collected, "[list(collected(1)), list(collected(2)), collected(3, [])]"),
    "tidied": (tidied, "[tidied(' x '), tidied('y')]"),
    "looked_up": (looked_up, "looked_up('a')"),
    "looked_up_error": (looked_up, _caught("looked_up_error('b')")),
    "imported": (imported, "imported(2)"),
    "asking": (asking, "[asking('q'), asking(question='r')]"),
    "asking_elsewhere": (asking_elsewhere, "asking_elsewhere({'question': 'q'})"),
    "asking_twice": (AskingTwice("k3"), "asking_twice('ab')"),
    "configured": (Configured(), "[configured(1), configured(2)]"),
    "calling": (Calling(), "calling(1)"),
    "plain": (Plain(), "[plain(1, 2), plain(x=3, y=4), plain(**{'x': 5, 'y': 6})]"),
    "plain_error": (Plain(), _caught("plain_error(1, '2')")),
    "changed": (changed, "changed(3, 4)"),
    "measuring": (Measuring(), "[measuring('a'), measuring('b')]"),
    "local": (local, "local('x')"),
    "recording": (Recording(), "[recording('x'), recording('y')]"),
    "raising": (Raising(), _caught("raising('x')")),
    "partial": (functools.partial(helpers.area, 2), "partial()"),
}


# ---------------------------------------------------------------------------------------------------------------------


class Guarded(Plain):
    name = "guarded"

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Reading(Plain):
    name = "reading"

    def __init__(self):
        super().__init__()
        self.file = open(os.devnull)
        self.file.close()


class Delegating(Plain):
    name = "delegating"

    def __init__(self):
        super().__init__()
        self.model = ScriptedModel([])
        self.agent = smolagents.CodeAgent(tools=[], model=self.model)


class Piped(PipelineTool):
    name = "piped"
    inputs = {"x": {"type": "string", "description": "Any."}}
    output_type = "string"


class Shared(Plain):
    name = "shared"
    started = threading.Event()


@tool
def locked(x: int) -> int:
    """Uses a lock of its module.

    Args:
        x: Any.
    """
    with _LOCK:
        return x


@tool
def unfinished(x: int) -> int:
    """Uses a name that is nowhere.

    Args:
        x: Any.
    """
    return driver.open(x)  # noqa: F821


@tool
def own_import(x: int) -> int:
    """Imports a module of the user's.

    Args:
        x: Any.
    """
    from tests.support.shipped import plain

    return plain.RATE * x


@tool
def agent_type(x: int) -> Any:
    """Returns a type of smolagents.

    Args:
        x: Any.
    """
    return AgentImage(PIL.Image.new("RGB", (x, x)))


@tool
def next_letter(x: int) -> str:
    """Goes through a generator.

    Args:
        x: Any.
    """
    return next(_LETTERS)


_LETTERS = (letter for letter in "abc")


class OfLangChain:
    name = "chained"
    description = "Is LangChain's."
    args = {"x": {"type": "string", "description": "Any."}}

    def run(self, given):
        return given


class MCPAdaptTool(Plain):
    """By its name, what adapts a tool of an MCP server."""

    name = "remote"


def _cant(kind):
    return f"a {kind} can't be shipped: it only means something in this process"


REFUSED: dict[str, tuple[Any, list[str]]] = {
    "guarded": (Guarded(), [f"self.lock: {_cant('_thread.lock')}"]),
    "reading": (Reading(), [f"self.file: {_cant('_io.TextIOWrapper')}"]),
    "shared": (Shared(), [f"Shared.started: {_cant('threading.Event')}"]),
    "delegating": (
        Delegating(),
        [
            "ScriptedModel: is smolagents' own and stays in this process",
            "CodeAgent: is smolagents' own and stays in this process",
            "self.model: it is a model, which is called from this process",
            "self.agent: it is an agent, whose model and tools are in this process",
        ],
    ),
    "locked": (locked, [f"_LOCK: {_cant('_thread.lock')}"]),
    "unfinished": (
        unfinished,
        ["driver: is not defined here; what exists in the sandbox only must be imported inside the tool"],
    ),
    "own_import": (
        own_import,
        ["tests.support.shipped: is not in the sandbox and is imported inside the tool; import it at the top"],
    ),
    "agent_type": (agent_type, ["AgentImage: is a type of smolagents; use the plain value"]),
    "next_letter": (next_letter, [f"_LETTERS: {_cant('generator')}"]),
    "piped": (Piped.__new__(Piped), ["it holds a model that is loaded in this process"]),
    "chained": (Tool.from_langchain(OfLangChain()), ["it holds a tool of LangChain, and only passes calls on"]),
    "remote": (MCPAdaptTool(), ["it calls an MCP server, whose connection is in this process"]),
    "user_input": (smolagents.UserInputTool(), ["it asks the person at this process's terminal"]),
    "final_answer": (
        smolagents.FinalAnswerTool(),
        ["it gives the final answer, which is recorded in this process"],
    ),
    "helper": (
        smolagents.CodeAgent(tools=[], model=ScriptedModel([]), name="helper", description="Helps."),
        ["it is an agent, whose model and tools are in this process"],
    ),
}
