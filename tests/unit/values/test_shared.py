"""One value that is held many times: small to send, and of a size that has bounds when it is shown."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from executor_api.values import EncodeError, OpaqueValue, ValueLimits, decode, encode

MIB = 1 << 20


@pytest.mark.parametrize("shared", ["x" * MIB, "é" * MIB, bytes(MIB), bytearray(MIB)], ids=["ascii", "text", "b", "ba"])
def test_a_text_that_is_held_twenty_times_is_sent_once_and_arrives_as_often(shared: Any) -> None:
    packed = encode([shared] * 20)
    assert len(packed) < 3 * MIB
    arrived = decode(packed)
    assert arrived == [shared] * 20
    assert all(each is arrived[0] for each in arrived)


@pytest.mark.parametrize(
    "value",
    [
        pd.DataFrame({"a": ["a text that repeats, as in a column of names"] * 100_000}),
        [np.zeros(MIB)] * 100,
        [Image.effect_noise((1000, 1000), 50.0)] * 1_000,
        [pd.DataFrame({"a": range(100_000), "b": ["x"] * 100_000})] * 100,
        {"a": ["x" * 1_000] * 10_000},
    ],
    ids=["column", "arrays", "images", "tables", "list"],
)
def test_what_honest_programs_share_arrives(value: Any) -> None:
    arrived = decode(encode(value))
    assert type(arrived) is type(value)
    assert not any(type(each) is OpaqueValue for each in arrived)


@pytest.mark.parametrize("kind", [str, bytes])
def test_what_is_shared_too_often_is_left_out_with_the_reason(kind: Any) -> None:
    shared = "é" * (4 * MIB) if kind is str else bytes(8 * MIB)
    packed = encode([shared] * 1_000)
    arrived = decode(packed)
    whole = [each for each in arrived if type(each) is kind]
    assert len(arrived) == 1_000
    assert len(whole) == ValueLimits().unfolded_bytes // (8 * MIB)
    assert "unfold to more than" in arrived[len(whole)].repr
    assert arrived[-1].repr == "<left out, as above>"


def test_a_text_that_a_list_holds_a_thousand_times_is_not_joined_to_be_packed() -> None:
    shared = "x" * (8 * MIB)
    tracemalloc.start()
    try:
        encode([shared] * 1_000)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64 * MIB


def test_a_fallback_does_not_pack_what_is_shared_too_often_without_end() -> None:
    with pytest.raises(EncodeError, match="over the limit total_bytes"):
        encode([bytes(8 * MIB)] * 1_000, fallback=lambda value: bytes(value) if type(value) is bytes else None)


def test_the_text_of_what_arrives_is_bounded() -> None:
    limits = ValueLimits(unfolded_bytes=MIB)
    arrived = decode(encode([bytes(MIB // 8)] * 1_000, limits), limits)
    assert len(repr(arrived)) < 4 * MIB + 1_000 * 200  # four characters for a byte, and what is said of those left out


def test_a_smaller_limit_holds_for_both_ends() -> None:
    limits = ValueLimits(unfolded_bytes=5_000)
    arrived = decode(encode([["x" * 1_000, ["y" * 1_000]], *["z" * 900] * 3, ["z" * 2_000] * 40], limits), limits)
    assert arrived[0] == ["x" * 1_000, ["y" * 1_000]]
