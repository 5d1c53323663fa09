"""Suggests the name that was meant for one that does not exist: an argument, a limit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

_LIKENESS_MIN = 0.6
_PART_CHARS_MIN = 3

# Names in other libraries, above all in smolagents' executors, that do not resemble our name for the same thing.
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
    """Returns the most likely of these names: a known synonym, a similar one, or one that contains the other."""
    import difflib  # needed for an error only

    names = list(names)
    known = _KNOWN_AS.get(name)
    if known is not None and known.partition("=")[0] in names:
        return known
    stem = name.removesuffix("s")
    is_long = len(stem) >= _PART_CHARS_MIN
    if parts := [each for each in names if is_long and stem in each]:
        return min(parts, key=len)
    if alike := difflib.get_close_matches(name, names, n=1, cutoff=_LIKENESS_MIN):
        return alike[0]
    return min((each for each in names if is_long and each in stem), key=len, default=None)


def unknown_name(name: str, names: Iterable[str], *, form: str = "{}") -> str:
    """Ends a sentence about an unknown name: with the name that was meant, else with all names."""
    names = list(names)
    meant = nearest(name, names)
    if meant is None:
        return f"there are {', '.join(names)}"
    return f"did you mean {meant if '=' in meant else form.format(meant)}?"


def named_parameters(function: Callable[..., object]) -> list[str]:
    """Returns the names of the parameters that can be given by name."""
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [
        name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds and name != "self"
    ]
