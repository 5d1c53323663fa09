"""Another module of the user's: some of its names are also names of `plain`, for other things."""

# The shapes are the users', who annotate some of their tools and not others.
# mypy: ignore-errors

from __future__ import annotations

import math

RATE = 100
_seen: list[str] = []


def clean(text: str) -> str:
    _seen.append(text)
    return f"{text.strip()}/{RATE}/{len(_seen)}"


def area(radius: float) -> float:
    return round(math.pi * radius**2, 3)


class Point:
    """A point, with a name that `plain` has as well."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __repr__(self) -> str:
        return f"helpers.Point({self.x})"


def counted(function):
    """A decorator of the user's that keeps count."""
    import functools

    calls = 0

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        return calls, function(*args, **kwargs)

    return wrapper
