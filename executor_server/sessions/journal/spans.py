"""Finds the segments with events that are still needed, by the numbers of the events in each."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol


class Log(Protocol):
    """An execution or a process: the numbers of its first kept event, and of its last one."""

    @property
    def first_number(self) -> int: ...
    @property
    def last_number(self) -> int: ...


@dataclass
class _Span:
    """A segment, and the number of the last event of each execution or process at its start and at its end."""

    segment: int
    start: dict[str, int]
    end: dict[str, int]


class SegmentSpans:
    """The spans of all segments, in order. `executions` are those known at the time of a call."""

    def __init__(self) -> None:
        self._spans: list[_Span] = []

    def begin(self, segment: int, executions: Mapping[str, Log]) -> None:
        self._spans.append(_Span(segment, _last_numbers(executions), {}))

    def end(self, executions: Mapping[str, Log]) -> None:
        if self._spans:
            self._spans[-1].end = _last_numbers(executions)

    def forget(self, execution_id: str) -> None:
        """Removes an execution from all spans, since its id may be reused for one whose events start at 1 again."""
        for span in self._spans:
            span.start.pop(execution_id, None)
            span.end.pop(execution_id, None)

    def drop_unneeded(self, pinned: Collection[int], executions: Mapping[str, Log]) -> set[int]:
        """Returns, once each, the segments that are neither pinned nor hold an event that is still kept."""
        needed = [span for span in self._spans if span.segment in pinned or _holds_events(span, executions)]
        unneeded = {span.segment for span in self._spans} - {span.segment for span in needed}
        self._spans = needed
        return unneeded


def _last_numbers(executions: Mapping[str, Log]) -> dict[str, int]:
    return {execution_id: execution.last_number for execution_id, execution in executions.items()}


def _holds_events(span: _Span, executions: Mapping[str, Log]) -> bool:
    return any(
        last > span.start.get(execution_id, 0) and last >= executions[execution_id].first_number
        for execution_id, last in span.end.items()
    )
