"""Number of rounds in which a test repeats what it proves.

`make test` runs every test, a test that repeats itself with enough rounds to fail on a plain mistake. `make test-all`
(`pytest --all`) runs all rounds, which also find what goes wrong once in many times.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

VARIABLE = "EXECUTOR_TEST_ROUNDS"
"""Set to "all" by `pytest --all`, before test modules are imported."""
ALL = os.environ.get(VARIABLE) == "all"


def rounds(every: int, usual: int) -> int:
    """`every` round with --all, else the `usual` number of them."""
    return every if ALL else usual


def one_of_each(cases: Iterable[T], kind: Callable[[T], Any]) -> list[T]:
    """All cases with --all, else the first of each kind."""
    every = list(cases)
    return every if ALL else list({kind(case): case for case in reversed(every)}.values())[::-1]


def usual(cases: Iterable[T], *, but: Collection[T]) -> list[T]:
    """All cases with --all, else those `but` the long ones whose claim another case makes at less cost."""
    return [case for case in cases if ALL or case not in but]
