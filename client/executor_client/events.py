"""The events that `on_event` receives during an execution. `number` is the position in the execution's journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from executor_client._core.short_repr import ShortRepr
from executor_client.results import Display, Image


@dataclass(frozen=True)
class QueuedEvent(ShortRepr):
    """The execution waits for `ahead` earlier ones of its session."""

    number: int
    ahead: int


@dataclass(frozen=True)
class LogEvent(ShortRepr):
    """The program printed."""

    number: int
    stream: Literal["stdout", "stderr"]
    text: str


@dataclass(frozen=True)
class OutputCutEvent(ShortRepr):
    """Output is omitted here: the program printed more than `output_bytes`."""

    number: int
    omitted_bytes: int


@dataclass(frozen=True)
class ImageEvent(ShortRepr):
    """The program displayed an image."""

    number: int
    image: Image


@dataclass(frozen=True)
class DisplayEvent(ShortRepr):
    """The program displayed an object with representations other than an image."""

    number: int
    display: Display


@dataclass(frozen=True)
class ToolCallEvent(ShortRepr):
    """The program called a host tool, which now runs."""

    number: int
    call_id: str
    name: str


@dataclass(frozen=True)
class LimitWarningEvent(ShortRepr):
    """A limit is nearly used up. `limit` is the name of a field of `Limits`."""

    number: int
    limit: str
    used: int
    budget: int


ExecutionEvent = QueuedEvent | LogEvent | OutputCutEvent | ImageEvent | DisplayEvent | ToolCallEvent | LimitWarningEvent
