"""The limits of one value, and the two errors of the codec.

Nothing here imports `dataclasses`: it costs a fresh interpreter more than the whole codec does, and this package is
imported at the start of every sandbox.
"""

from __future__ import annotations

from executor_api.limits import OUTPUT_NODES_MAX, OUTPUT_PIXELS_MAX, OUTPUT_VALUE_BYTES_MAX, VALUE_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Bits and digits of integers and of the parts of fractions: 4,300 decimal digits are the most that Python writes by
# default. A larger one would arrive as a value whose `repr` raises.
MAX_INT_BITS = 14_284
MAX_INT_DIGITS = 4_300
# Earlier senders sent integers of this many bits; beyond MAX_INT_BITS a receiver makes an OpaqueValue of one.
MAX_SENT_INT_BITS = 1 << 20
# Integers up to this one are bare numbers in JSON, on which all JSON readers agree.
MAX_BARE_INT = (1 << 63) - 1
MAX_DECIMAL_CHARS = 400_000
# Bytes up to this size are sent inside the tree; larger ones in a buffer of their own.
MAX_INLINE_BYTES = 1024
MAX_TYPE_NAME_CHARS = 200
# References let a small tree represent a huge value: each of 60 lists can hold the one before it twice. Counted with
# every reference followed, a value has at most this many nodes for each one that the limits allow.
MAX_UNFOLDING = 16
# Longer bare text counts by its bytes in an unfolded value, shorter text as a node. An array of numbers counts for at
# most SHOWN_ARRAY_BYTES: its text shows a thousand numbers, whatever its size.
COUNTED_TEXT_CHARS = 32
SHOWN_ARRAY_BYTES = 64 << 10
# JSON values of a node's header, its list and its tag included. Values of larger headers beyond that are counted:
# together at most one for each node that the limits allow.
VALUES_PER_NODE = 5
# Objects of pandas and Pillow cost a receiver as much as many plain values. So they count as this many nodes for
# themselves and for each child: 10,000 columns, or as many series, indexes or images, are made in two seconds.
NODES_PER_PART = {
    **dict.fromkeys(["pd.frame", "pd.block", "pd.series", "pd.index", "pd.rangeindex", "pd.multiindex"], 20),
    **dict.fromkeys(["pd.categories", "pd.strings", "pd.masked", "pd.moments", "pd.periods", "pd.intervals"], 20),
    **dict.fromkeys(["pil.png", "pil.raw"], 60),
    "pd.timestamp": 5,
}
# Columns of a table of several types, each of which is sent by itself.
MAX_FRAME_COLUMNS = 10_000
# Levels of one index, which pandas shows in quadratic time.
MAX_INDEX_LEVELS = 100
# Keys of one dict or members of one set that share one hash. Python's integers collide on demand, and a dict of a
# million of them takes hours to build.
MAX_EQUAL_HASHES = 100


class Frozen:
    """A value: its slots are set once, and compared, hashed and shown together."""

    __slots__: tuple[str, ...] = ()

    def _state(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} does not change")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} does not change")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._state() == other._state()

    def __hash__(self) -> int:
        return hash(self._state())

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return f"{type(self).__name__}({shown})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._state()


class ValueLimits(Frozen):
    """The limits of one value, the same for encoding and for decoding.

    `depth`: containers inside each other. `nodes`: values inside the value, each reference counting as one.
    `total_bytes`: the packed form. `image_pixels`: all images of the value together. `repr_chars`: each of the texts
    that represent a value that can't be sent. `unfolded_bytes`: text and bytes with every reference followed; a
    thousand references to one text of 10 MB are small to send, and 10 GB to print.
    """

    # In the order of __init__.
    __slots__ = ("depth", "nodes", "total_bytes", "image_pixels", "repr_chars", "unfolded_bytes")  # noqa: RUF023
    depth: int
    nodes: int
    total_bytes: int
    image_pixels: int
    repr_chars: int
    unfolded_bytes: int

    def __init__(
        self,
        depth: int = 200,
        nodes: int = 1_000_000,
        total_bytes: int = VALUE_BYTES_MAX,
        image_pixels: int = 64_000_000,
        repr_chars: int = 2_000,
        unfolded_bytes: int = 256 << 20,
    ) -> None:
        given = (depth, nodes, total_bytes, image_pixels, repr_chars, unfolded_bytes)
        for name, number in zip(self.__slots__, given):
            if number < 1:
                raise ValueError(f"{name} must be at least 1, not {number}")
            object.__setattr__(self, name, number)


DEFAULT_LIMITS = ValueLimits()
OUTPUT_LIMITS = ValueLimits(nodes=OUTPUT_NODES_MAX, total_bytes=OUTPUT_VALUE_BYTES_MAX, image_pixels=OUTPUT_PIXELS_MAX)
"""The limits of the value of a step."""


def count_nodes(tag: str, children: int) -> int:
    """Returns the number of nodes that a node counts as besides itself."""
    return children + NODES_PER_PART.get(tag, 0) * (1 + children)


class OverLimit(Exception):
    """A value is sent as an OpaqueValue because of its size; the message names the limit."""


class EncodeError(ValueError):
    """The value is larger than `total_bytes` allows. No other value is refused."""


class DecodeError(ValueError):
    """The bytes are not a packed value, or the value exceeds the limits."""
