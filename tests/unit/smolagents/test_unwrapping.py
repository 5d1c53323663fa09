"""Unwrapping smolagents' own types into plain values."""

from __future__ import annotations

from typing import Any

import PIL.Image
import pytest
from smolagents.agent_types import AgentImage, AgentText

from executor_client.smolagents.unwrapping import DEPTH_MAX, unwrapped

PICTURE = PIL.Image.new("RGB", (4, 3), (1, 2, 3))


def test_it_is_done_at_any_depth_and_in_keys() -> None:
    text = AgentText("x")
    got = unwrapped({"pictures": [AgentImage(PICTURE), (AgentText("y"),)], text: {text}, 1: frozenset([text])})
    assert got == {"pictures": [PICTURE, ("y",)], "x": {"x"}, 1: frozenset(["x"])}
    kinds = [type(got["pictures"][0]), type(got["pictures"][1][0]), *map(type, got["x"]), *map(type, got[1])]
    assert kinds == [PIL.Image.Image, str, str, str]
    assert [type(key) for key in got] == [str, str, int]
    assert type(unwrapped(text)) is str


def test_what_is_shared_or_contains_itself_stays_so_and_the_callers_own_is_not_changed() -> None:
    row = [AgentText("x")]
    value: list[Any] = [row, row, (row,)]
    value.append(value)
    got = unwrapped(value)
    assert got[0] is got[1] is got[2][0] and got[3] is got
    assert type(got[0][0]) is str and type(row[0]) is AgentText


@pytest.mark.parametrize("value", [[1, {"a": (2,)}], {"a": {1}}, 5, "x", PICTURE, [AgentText]])
def test_where_there_is_nothing_to_do_nothing_is_made(value: object) -> None:
    assert unwrapped(value) is value


def test_a_value_without_end_ends() -> None:
    value: Any = [AgentText("x")]
    for _ in range(100_000):
        value = [value]
    got = unwrapped(value)
    for _ in range(DEPTH_MAX):
        (got,) = got
    assert type(got) is list
