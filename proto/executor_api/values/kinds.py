"""What the parts of the codec agree on: how a value is lowered to a node, and what a node is made of.

A node of the tree is a bare JSON scalar, which stands for itself, or a list

    [tag, header ..., child ...]

A header entry is plain JSON whose type the tag fixes; a child is a node. The tag says how many of each there are, so
nothing inside a node is ever looked at to find out what it is.

To encode a value, something lowers it: header, children, and whether it is mutable. The children are values themselves.
To decode a node, its `Kind` makes the value from the header and the decoded children.
"""

from __future__ import annotations

import re
from binascii import a2b_base64, b2a_base64

from executor_api.values.generic import OpaqueValue
from executor_api.values.limits import MAX_INLINE_BYTES, DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, Protocol

    from executor_api.values.limits import ValueLimits

    Lowered = tuple[Any, Sequence[object], bool]
    """[tag, header ...] or a bare scalar; the children; whether the value exists before its children do."""

    class Writer(Protocol):
        """What lowering may use of the encoder."""

        limits: ValueLimits

        def add_buffer(self, data: bytes | memoryview) -> int:
            """Appends a buffer and gives its number. Raises EncodeError beyond `total_bytes`."""
            ...

        def add_unfolded(self, count: int) -> None:
            """Counts values that are part of a leaf."""
            ...

        def add_unfolded_bytes(self, count: int) -> None:
            """Counts text that stands bare; or, below 0, takes back what of a buffer no text of the value shows."""
            ...

        def take_pixels(self, count: int) -> bool:
            """Claims room for an image; False when `image_pixels` are used up."""
            ...

        def take_labels(self, count: int) -> bool:
            """Claims room for labels that are not written out; False when there would be too many."""
            ...

    class Reader(Protocol):
        """What making a value may use of the decoder."""

        limits: ValueLimits
        foreign: Callable[[memoryview], object] | None
        needs_libraries: bool
        dtypes: dict[str, Any]

        def take_buffer(self, number: int) -> memoryview:
            """A buffer, which is then used up: no small tree can use a large buffer many times."""
            ...

        def add_unfolded(self, count: int) -> None:
            """Counts values that are part of a leaf."""
            ...

        def add_unfolded_bytes(self, count: int) -> None:
            """Below 0: takes back what of a buffer no text of the value shows."""
            ...

        def take_pixels(self, count: int) -> None:
            """Claims room for an image. Raises DecodeError when `image_pixels` are used up."""
            ...

        def take_labels(self, count: int) -> None:
            """Claims room for labels that are not written out. Raises DecodeError when there are too many."""
            ...


ANY_NUMBER = -1
PAIRS = -2
NoneType = type(None)


class Kind:
    """How the node of one tag becomes a value.

    `header` gives the type, or the types, of each header entry; `children` their number, ANY_NUMBER or PAIRS. `make` is
    called with the reader, the list of decoded children and the header's entries. A kind that can contain itself has an
    `open` too: called with the header's entries it makes an empty value, which `make` gets, before the children, to
    fill.
    """

    __slots__ = ("children", "header", "make", "open")

    def __init__(
        self,
        make: Callable[..., object],
        header: tuple[Any, ...] = (),
        children: int = 0,
        open: Callable[..., object] | None = None,
    ) -> None:
        self.make = make
        self.header = tuple(entry if type(entry) is tuple else (entry,) for entry in header)
        self.children = children
        self.open = open

    def build(self, reader: Reader, shell: Any, children: list[Any], header: list[Any]) -> object:
        """The value; `shell` is what `open` gave."""
        if self.open is None:
            return self.make(reader, children, *header)
        return self.make(reader, shell, children, *header)

    def split(self, node: list[Any]) -> tuple[list[Any], list[Any]]:
        """The header's entries and the children of a node, checked for number and type. Raises DecodeError."""
        end = 1 + len(self.header)
        header, children = node[1:end], node[end:]
        if len(header) != len(self.header):
            raise DecodeError(f"a {node[0]} node has {len(header)} header entries, not {len(self.header)}")
        for entry, types in zip(header, self.header):
            if type(entry) not in types:
                raise DecodeError(f"a {node[0]} node has a {type(entry).__name__} in its header")
        count = len(children)
        if self.children == PAIRS:
            if count % 2:
                raise DecodeError(f"a {node[0]} node has a key without a value")
        elif self.children not in (ANY_NUMBER, count):
            raise DecodeError(f"a {node[0]} node has {count} children, not {self.children}")
        return header, children


def matches(pattern: str, text: str) -> bool:
    """Whether all of the text matches. Patterns are compiled at their first use: importing this package is quick."""
    return re.fullmatch(pattern, text, re.ASCII) is not None


def without_library(reader: Reader, library: str, type_name: str, shown: str) -> OpaqueValue:
    """Return what stands for a value that needs a missing library. Raises DecodeError where it must not be lost."""
    if reader.needs_libraries:
        raise DecodeError(
            f"a {type_name} cannot be had here: this Python has no {library}. Use an image that has {library}, or send "
            "what is in it as lists, dicts and numbers"
        )
    return OpaqueValue(type_name, shown)


def put_bytes(writer: Writer, data: bytes | memoryview) -> int | str:
    """A header entry for bytes: base64 text when they are few, else the number of a buffer."""
    if memoryview(data).nbytes <= MAX_INLINE_BYTES:
        return b2a_base64(data, newline=False).decode("ascii")
    return writer.add_buffer(data)


def get_bytes(reader: Reader, entry: int | str) -> bytes | memoryview:
    """The bytes of a header entry. Raises DecodeError, also for base64 that only a lenient reader takes."""
    if isinstance(entry, str):
        data = a2b_base64(entry)
        # It passes over what is no base64, and there is no strict mode before Python 3.11.
        if b2a_base64(data, newline=False).decode("ascii") != entry:
            raise DecodeError("bytes that are not base64")
        return data
    return reader.take_buffer(entry)


BYTES_ENTRY = (int, str)
