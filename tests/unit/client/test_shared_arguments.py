"""A host tool that changes its arguments is reported, once; no other is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest

from executor_api.values import OpaqueValue, decode, encode
from executor_client._core import shared_arguments
from executor_client._core.limits import ARGUMENT_BYTES_COMPARED_MAX, CALLS_COMPARED_MAX
from executor_client._core.shared_arguments import Arguments, ArgumentWatch


def _called(watch: ArgumentWatch, change: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    packed = encode((args, kwargs))
    given_args, given_kwargs = decode(packed)
    given = Arguments.received(given_args, given_kwargs, packed)
    change(*given.args, **given.kwargs)
    watch.compare("fill", given)


def _set(array: Any) -> None:
    array[0] = 7


CHANGES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "a list that grows": (lambda rows: rows.append(1), ([],), {}),
    "a list that grows a lot": (lambda rows: rows.extend(range(10**6)), ([],), {}),
    "a dict": (lambda **kw: kw["found"].update(a=1), (), {"found": {}}),
    "deep inside": (lambda rows: rows[0]["a"].add(2), ([{"a": {1}}],), {}),
    "an array": (_set, (np.zeros(3),), {}),
    "a DataFrame": (lambda frame: frame.insert(0, "b", 1), (pd.DataFrame({"a": [1]}),), {}),
    "bytes": (lambda data: data.extend(b"x"), (bytearray(b"a"),), {}),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_changed_argument_is_warned_of_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """The list that a tool filled stayed empty in the sandbox, without a word."""
    change, args, kwargs = CHANGES[name]
    watch = ArgumentWatch()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            _called(watch, change, *args, **kwargs)
    (record,) = caplog.records
    assert "the host tool 'fill' changed an argument" in record.getMessage()


@pytest.mark.parametrize(
    "args",
    [
        ([1, {"a": {3, 1, 2}}, float("nan")],),
        ({"frame": pd.DataFrame({"a": [1, 2]})}, np.arange(3)),
        ([OpaqueValue("a.B", "<B>")], bytearray(b"x")),
        ("text", 1, None),
        (),
    ],
)
def test_arguments_that_stay_as_they_are_are_not_warned_of(
    args: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        _called(ArgumentWatch(), lambda *_: None, *args)
    assert caplog.records == []


def test_large_arguments_and_many_calls_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Arguments] = []
    monkeypatch.setattr(shared_arguments, "_has_changed", lambda given, packed: compared.append(given))
    watch = ArgumentWatch()
    _called(watch, lambda _: None, [bytes(ARGUMENT_BYTES_COMPARED_MAX + 1)])
    _called(watch, lambda _: None, "a text does not change")
    assert compared == []
    for _ in range(CALLS_COMPARED_MAX + 10):
        _called(watch, lambda _: None, [1])
    assert len(compared) == CALLS_COMPARED_MAX


def test_large_arguments_are_not_kept_until_the_answer_is_sent() -> None:
    """A hundred megabytes were there three times: as an argument, as it came, and as the result that is sent."""
    small, large = (encode((([bytes(size)],), {})) for size in (1, ARGUMENT_BYTES_COMPARED_MAX + 1))
    assert Arguments.received(([b"a"],), {}, small).to_compare() is not None
    received = Arguments.received(([b"a"],), {}, large)
    assert received.packed is None and received.to_compare() is None


class _Odd:
    """As what a tool may put into its argument."""

    def __reduce__(self) -> Any:
        raise RuntimeError

    def __repr__(self) -> str:
        raise RuntimeError


def test_an_argument_that_can_no_longer_be_encoded_fails_nothing() -> None:
    _called(ArgumentWatch(), lambda rows: rows.append(_Odd()), [])
