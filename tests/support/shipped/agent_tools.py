"""smolagents' tools of many shapes, each with expressions that call it; and those that can't leave this process."""

# The shapes are the users', who annotate some of their tools and not others.
# mypy: ignore-errors
# ruff: noqa: B006, RUF012, UP045

from __future__ import annotations

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
from tests.support.shipped.helpers import counted

RATES = {"eur": 2.0, "usd": 3.0}
_WORD = re.compile(r"[a-z]+", re.IGNORECASE)


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

    @make_tool
    @counted
    def tried(x: int) -> tuple:
        """Has a decorator of the user's, too.

        Args:
            x: Any number.
        """
        return x + 1


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
    "words": (words, "[words('Ab c'), words('Ab c', limit=1)]"),
    "priced": (priced, "priced('abc')"),
    "tried": (tried, "[tried(1), tried(2)]"),
    "scaled_by_two": (scaled_by_two, "[scaled_by_two(1), scaled_by_two(2)]"),
    "scaled_by_ten": (scaled_by_ten, "[scaled_by_ten(1), scaled_by_ten(2)]"),
    "collected": (collected, "[list(collected(1)), list(collected(2)), collected(3, [])]"),
    "imported": (imported, "imported(2)"),
    "asking": (asking, "[asking('q'), asking(question='r')]"),
    "asking_elsewhere": (asking_elsewhere, "asking_elsewhere({'question': 'q'})"),
    "asking_twice": (AskingTwice("k3"), "asking_twice('ab')"),
    "calling": (Calling(), "calling(1)"),
    "plain": (Plain(), "[plain(1, 2), plain(x=3, y=4), plain(**{'x': 5, 'y': 6})]"),
    "plain_error": (Plain(), _caught("plain_error(1, '2')")),
    "changed": (changed, "changed(3, 4)"),
    "measuring": (Measuring(), "[measuring('a'), measuring('b')]"),
    "raising": (Raising(), _caught("raising('x')")),
}


# ---------------------------------------------------------------------------------------------------------------------


class Guarded(Plain):
    name = "guarded"

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


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


@tool
def agent_type(x: int) -> Any:
    """Returns a type of smolagents.

    Args:
        x: Any.
    """
    return AgentImage(PIL.Image.new("RGB", (x, x)))


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
    "delegating": (
        Delegating(),
        [
            "ScriptedModel: is smolagents' own and stays in this process",
            "CodeAgent: is smolagents' own and stays in this process",
            "self.model: it is a model, which is called from this process",
            "self.agent: it is an agent, whose model and tools are in this process",
        ],
    ),
    "agent_type": (agent_type, ["AgentImage: is a type of smolagents; use the plain value"]),
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
