"""Answers a name that there is not with the one that was meant: arguments of functions, limits, and the like."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

P = ParamSpec("P")
R = TypeVar("R")

_LIKENESS_MIN = 0.6
_PART_CHARS_MIN = 3

# Names that other libraries, smolagents' executors above all, have for what we call otherwise: the letters alone would
# not lead to our word.
_KNOWN_AS = {
    "api_key": "token",
    "host": "address",
    "packages": "image",
    "server": "address",
    "timeout": "limits={'wall_time_s': ...}",
    "timeout_s": "limits={'wall_time_s': ...}",
    "timeout_seconds": "limits={'wall_time_s': ...}",
    "url": "address",
}


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The one of these names that was most likely meant: alike, containing the other, or known by it elsewhere."""
    import difflib  # only ever needed on the way to an error

    names = list(names)
    known = _KNOWN_AS.get(name)
    if known is not None and known.partition("=")[0] in names:
        return known
    if alike := difflib.get_close_matches(name, names, n=1, cutoff=_LIKENESS_MIN):
        return alike[0]
    stem = name.removesuffix("s")
    parts = [each for each in names if len(stem) >= _PART_CHARS_MIN and (stem in each or each in stem)]
    return min(parts, key=len, default=None)


def unknown_name(name: str, names: Iterable[str], *, form: str = "{}") -> str:
    """The end of a sentence on a name that there is not: what was meant, or else all that there are."""
    names = list(names)
    meant = nearest(name, names)
    if meant is None:
        return f"there are {', '.join(names)}"
    return f"did you mean {meant if '=' in meant else form.format(meant)}?"


def names_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function so that an argument that it does not have is answered with the one that was meant."""
    offered = named_parameters(function)
    known = frozenset(offered)
    # "ExecutorClient" for its __init__: that is what the caller wrote.
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    def check(kwargs: Mapping[str, object]) -> None:
        if not kwargs.keys() <= known:
            name = next(each for each in kwargs if each not in known)
            raise TypeError(f"{called}() has no argument {name!r}: {unknown_name(name, offered, form='{}=')}")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            check(kwargs)
            return await function(*args, **kwargs)

        return cast("Callable[P, R]", call_async)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        check(kwargs)
        return function(*args, **kwargs)

    return call


def names_fields(kind: type[R]) -> type[R]:
    """Decorates a class, a dataclass as a rule, so that its making is answered as `names_arguments` does."""
    type.__setattr__(kind, "__init__", names_arguments(kind.__init__))
    return kind


def named_parameters(function: Callable[..., object]) -> list[str]:
    """Return the names of the parameters that can be given by name."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds and name != "self"
    ]
