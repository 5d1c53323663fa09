"""Values arrive with their types, contents and sharing."""

from __future__ import annotations

import collections
import subprocess
from pathlib import Path

import numpy as np
import pytest

from executor_api.values import EncodeError, OpaqueValue, ValueLimits, decode, encode, encode_in_parts
from tests.unit.values import cases

REPOSITORY = Path(__file__).parents[3]
PYENV = Path("~/.pyenv/versions").expanduser()


def interpreters() -> list[Path]:
    """A CPython of each minor version that the guest supports, of those on this machine."""
    found = {path.parents[1].name.rpartition(".")[0]: path for path in sorted(PYENV.glob("3.*/bin/python"))}
    return [path for minor, path in found.items() if minor in ("3.9", "3.10", "3.11", "3.12", "3.13")]


@pytest.mark.parametrize("value", cases.CASES, ids=lambda value: type(value).__name__)
def test_standard_values_arrive_as_they_were(value: object) -> None:
    assert cases.same(decode(encode(value)), value)


@pytest.mark.parametrize("python", interpreters() or [None], ids=lambda path: path and path.parents[1].name)
def test_every_supported_python_reads_what_it_wrote(python: Path | None) -> None:
    if python is None:
        pytest.skip("no other CPython is installed under ~/.pyenv/versions")
    script = Path(cases.__file__)
    environment = {"PYTHONPATH": str(REPOSITORY / "proto"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run([python, script], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_parts_are_the_packed_value_and_share_what_is_large() -> None:
    large, small = np.arange(20_000.0), np.arange(100.0)
    value = {"a": large, "b": [small, b"x" * 100_000], "c": large}
    parts = encode_in_parts(value)
    assert b"".join(parts) == encode(value)
    assert len(parts) <= 5
    shared = [part for part in parts if np.shares_memory(large, np.frombuffer(part, np.uint8))]
    assert [memoryview(part).nbytes for part in shared] == [large.nbytes]


def test_decoding_a_memoryview_gives_the_same_as_decoding_bytes() -> None:
    packed = encode([b"x" * 5_000, 1])
    assert decode(memoryview(packed)) == decode(bytearray(packed)) == [b"x" * 5_000, 1]


def test_shared_values_stay_shared() -> None:
    row, text, point = [1, 2], {"a"}, (3, [4])
    received = decode(encode([row, row, {"row": row}, text, text, point, point]))
    assert received[0] is received[1] is received[2]["row"]
    assert received[3] is received[4]
    assert received[5] is received[6]


def test_values_that_are_only_equal_stay_apart() -> None:
    first, second = decode(encode([[1], [1]]))
    assert first is not second


def test_a_list_can_contain_itself() -> None:
    value: list[object] = [1]
    value.append({"self": value})
    received = decode(encode(value))
    assert received[1]["self"] is received


@pytest.mark.parametrize("shell", [collections.OrderedDict, dict, lambda: collections.defaultdict(list)])
def test_a_dict_can_contain_itself(shell: type[dict]) -> None:
    value = shell()
    value["self"] = [value]
    received = decode(encode(value))
    assert received["self"][0] is received


def test_a_tuple_can_contain_itself_through_a_list() -> None:
    inner: list[object] = []
    value = (inner, (inner,))
    inner.append(value)
    received = decode(encode(value))
    assert received[0] is received[1][0]
    assert received[0][0][0] is received[0]


def test_what_is_too_deep_becomes_opaque_and_the_rest_arrives() -> None:
    value: list[object] = ["bottom"]
    for _ in range(100_000):
        value = [value]
    received = decode(encode(["here", value]))
    assert received[0] == "here"
    depth = 0
    while isinstance(received, list):
        received, depth = received[-1], depth + 1
    assert (depth, received.type_name) == (200, "list")


def test_what_has_too_many_nodes_becomes_opaque_and_the_rest_arrives() -> None:
    limits = ValueLimits(nodes=100)
    received = decode(encode({"small": [1, "a"], "large": [1, "a"] * 100}, limits), limits)
    assert received["small"] == [1, "a"]
    reason, shown = received["large"].repr.split("\n")
    assert (received["large"].type_name, shown[:8]) == ("list", "[1, 'a',")
    assert "more than the limit of 100 nodes; send a part of it" in reason


def test_references_that_unfold_without_end_become_opaque() -> None:
    """Sixty lists, each of them twice in the next: 120 references, and a repr of 2**60 items."""
    value: list[object] = ["x"]
    for _ in range(60):
        value = [value, value]
    received = decode(encode(value))
    while isinstance(received, list):
        received = received[1]
    assert isinstance(received, OpaqueValue)


def test_limits_count_alike_on_both_ends() -> None:
    limits = ValueLimits(depth=3, nodes=50)
    shared = list(range(40))
    decode(encode([shared] * 49, limits), limits)
    decode(encode([[["deep", "enough"]]], limits), limits)


@pytest.mark.parametrize("value", [b"x" * 2_000, "x" * 2_000, list(range(1_000)), dict.fromkeys(range(200), "é" * 9)])
def test_a_value_over_total_bytes_is_refused_by_size(value: object) -> None:
    with pytest.raises(EncodeError, match=r"total_bytes of 1500"):
        encode(value, ValueLimits(total_bytes=1_500))


def test_an_integer_too_large_to_carry_becomes_opaque() -> None:
    assert decode(encode(1 << (1 << 21))) == OpaqueValue("int", "<an int of 2097153 bits>")


def test_limits_refuse_what_is_no_limit() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1"):
        ValueLimits(depth=0)
