"""Checks the arguments of public calls against their annotations: names, and types of plain data.

Otherwise a value of the wrong type would fail deep in the client or the daemon, without naming the argument.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from executor_client._core.suggest import named_parameters, unknown_name
from executor_client.errors import ExecutorClientError, InvalidRequest

P = ParamSpec("P")
R = TypeVar("R")
Test = Callable[[Any], bool]

_KINDS: dict[Any, Any] = {
    int: numbers.Integral,  # numpy's integers are Integral, too
    float: numbers.Real,
    bytes: (bytes, bytearray, memoryview),
}
_OURS = (str(Path(__file__).parents[1]), contextlib.__file__)
_FORMS: dict[Any, str] = {bool: "True", int: "1", float: "1.5", str: '"..."', bytes: 'b"..."', type(None): "None"}


def checks_calls(kind: type[R]) -> type[R]:
    """Class decorator, also for dataclasses: the constructor and public methods check their arguments."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, classmethod):
            type.__setattr__(kind, name, classmethod(checks_arguments(member.__func__)))
        elif inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            type.__setattr__(kind, name, checks_arguments(member))
    return kind


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Decorates a function to raise TypeError, with a suggestion, for an unknown argument, and InvalidRequest, with the
    expected form, for a value of the wrong type."""
    parameters = inspect.signature(function).parameters
    offered = named_parameters(function)
    takes_any_name = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    # "ExecutorClient" for its __init__, as the caller wrote it.
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.cache
    def tests() -> dict[str, tuple[Any, Test]]:
        # At the first call: annotations may name things that are imported later.
        hints = typing.get_type_hints(function)
        found = ((name, hints[name], _test_of(hints[name])) for name in parameters if name in hints)
        variadic = {inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL}
        return {name: (hint, test) for name, hint, test in found if test and parameters[name].kind not in variadic}

    def check(args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        for name, value in (*zip(parameters, args, strict=False), *kwargs.items()):
            if name not in parameters and not takes_any_name:
                raise TypeError(f"{called}() has no argument {name!r}: {unknown_name(name, offered, form='{}=')}")
            hint, test = tests().get(name, (None, None))
            if test is not None and not test(value):
                raise InvalidRequest(f"{called}(): {name} is {_shown(value)}; write {name}={_form_of(hint)}")

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*args: Any, **kwargs: Any) -> Any:
            try:
                check(args, kwargs)
                return await function(*args, **kwargs)
            except ExecutorClientError as error:
                _drop_our_frames(error)
                raise

        return cast("Callable[P, R]", call_async)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            check(args, kwargs)
            return function(*args, **kwargs)
        except ExecutorClientError as error:
            _drop_our_frames(error)
            raise

    return call


def _drop_our_frames(error: ExecutorClientError) -> None:
    """Drops this package's frames from a traceback, so that callers see their own lines."""
    frames, traceback = [], error.__traceback__
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_OURS):
            frames.append(traceback)
        traceback = traceback.tb_next
    shortened = None
    for each in reversed(frames):
        shortened = types.TracebackType(shortened, each.tb_frame, each.tb_lasti, each.tb_lineno)
    error.__traceback__ = shortened


def _test_of(hint: Any) -> Test | None:
    """Returns a test for a type; None for types that may accept any value."""
    kind, parts = typing.get_origin(hint) or hint, [_test_of(each) for each in typing.get_args(hint)]
    if kind in (typing.Union, types.UnionType):
        given = [test for test in parts if test is not None]
        return (lambda value: any(test(value) for test in given)) if len(given) == len(parts) else None
    if kind is Callable:
        return callable
    if kind is typing.Literal:
        return lambda value: value in typing.get_args(hint)
    if not isinstance(kind, type) or kind in (object, Any) or getattr(kind, "_is_protocol", False):
        return None
    if issubclass(kind, Mapping):
        has_text_keys, has_texts = [each is str for each in typing.get_args(hint)] or (False, False)
        return lambda value: (
            isinstance(value, kind)
            and not (has_text_keys and not all(isinstance(each, str) for each in value))
            and not (has_texts and not all(isinstance(each, str) for each in value.values()))
        )
    if issubclass(kind, Iterable) and parts:
        item = parts[0]
        return lambda value: (
            isinstance(value, kind)
            and not isinstance(value, (str, bytes))
            and (item is None or not isinstance(value, (list, tuple, set, frozenset)) or all(map(item, value)))
        )
    if kind.__module__ == "builtins" or issubclass(kind, Iterable):
        plain = _KINDS.get(kind, kind)
        return lambda value: isinstance(value, plain) and not (type(value) is bool and kind is not bool)
    # A stand-in for one of our objects is accepted; plain data is not.
    return lambda value: isinstance(value, kind) or type(value).__module__ != "builtins"


def _shown(value: object) -> str:
    """Describes a value by its type and the types of its items: its content may be secret."""
    parts: list[object] = []
    if isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    held = ", ".join(sorted({type(part).__name__ for part in parts}))
    return f"of type {type(value).__name__}" + (f" and holds {held}" if held else "")


def _form_of(hint: Any) -> str:
    """Returns what to write for a type."""
    kind = typing.get_origin(hint) or hint
    if kind is Callable:
        return "a function"
    if kind is typing.Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    parts = [_form_of(each) for each in typing.get_args(hint)[:2]]
    if kind in (typing.Union, types.UnionType):
        forms = map(_form_of, typing.get_args(hint))
        return " or ".join(dict.fromkeys(form for form in forms if form != "None"))
    if isinstance(kind, type) and issubclass(kind, Iterable) and parts:
        return f"{{{': '.join(parts)}}}" if issubclass(kind, Mapping) else f"[{parts[0]}]"
    return _FORMS.get(kind) or ("..." if kind in (Any, object) else f"{getattr(kind, '__name__', kind)}(...)")
