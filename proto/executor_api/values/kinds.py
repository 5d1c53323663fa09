"""The interfaces of the codec's parts: the lowering of a value to a node, and the parts of a node.

A node of the tree is a bare JSON scalar, which stands for itself, or a list

    [tag, header ..., child ...]

A header entry is plain JSON whose type the tag fixes; a child is a node. The tag fixes the number of each, so the
kind of a part is never guessed from its content.

To encode a value, a function lowers it to the header, the children (values themselves) and whether it is mutable. To
decode a node, its `Kind` makes the value from the header and the decoded children.
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
    """([tag, header ...] or a bare scalar, the children, True when the value exists before its children do)."""

    class Writer(Protocol):
        """The part of the encoder that lowering uses."""

        limits: ValueLimits

        def add_buffer(self, data: bytes | memoryview) -> int:
            """Appends a buffer and returns its number. Raises EncodeError beyond `total_bytes`."""
            ...

        def expect_bytes(self, count: int) -> None:
            """Raises EncodeError if `count` more bytes don't fit, before anything is copied."""
            ...

        def add_unfolded(self, count: int) -> None:
            """Counts values that are part of a leaf."""
            ...

        def add_unfolded_bytes(self, count: int) -> None:
            """Counts bare text; a negative number takes back bytes of a buffer that no text of the value shows."""
            ...

        def take_pixels(self, count: int) -> bool:
            """Claims room for an image; False when `image_pixels` are used up."""
            ...

        def take_labels(self, count: int) -> bool:
            """Claims room for labels that are not written out; False when there would be too many."""
            ...

    class Reader(Protocol):
        """The part of the decoder that making a value uses."""

        limits: ValueLimits
        foreign: Callable[[memoryview], object] | None
        needs_libraries: bool
        dtypes: dict[str, Any]

        def take_buffer(self, number: int) -> memoryview:
            """Takes a buffer, once: no small tree can use a large buffer many times."""
            ...

        def add_unfolded(self, count: int) -> None:
            """Counts values that are part of a leaf."""
            ...

        def add_unfolded_bytes(self, count: int) -> None:
            """Takes back, by a negative number, bytes of a buffer that no text of the value shows."""
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
    """Makes values from the nodes of one tag.

    `header` gives the type, or the types, of each header entry; `children` their number, ANY_NUMBER or PAIRS. `make` is
    called with the reader, the list of decoded children and the header's entries. A kind that can contain itself has an
    `open` too: given the header's entries it makes an empty value, which `make` gets before the children and fills.
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
        """Returns the value; `shell` is the result of `open`."""
        if self.open is None:
            return self.make(reader, children, *header)
        return self.make(reader, shell, children, *header)

    def split(self, node: list[Any]) -> tuple[list[Any], list[Any]]:
        """Returns the header's entries and the children of a node, checked for number and type. Raises DecodeError."""
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
    """True when the whole text matches. Patterns are compiled at their first use, to keep the import fast."""
    return re.fullmatch(pattern, text, re.ASCII) is not None


def without_library(reader: Reader, library: str, type_name: str, shown: str) -> OpaqueValue:
    """Returns the substitute for a value that needs a missing library. Raises DecodeError where it must not be lost."""
    if reader.needs_libraries:
        raise DecodeError(
            f"a {type_name} cannot be had here: this Python has no {library}. Use an image that has {library}, or send "
            "what is in it as lists, dicts and numbers"
        )
    return OpaqueValue(type_name, shown)


def put_bytes(writer: Writer, data: bytes | memoryview) -> int | str:
    """Returns the header entry for bytes: base64 text when they are few, else the number of a buffer."""
    if memoryview(data).nbytes <= MAX_INLINE_BYTES:
        return b2a_base64(data, newline=False).decode("ascii")
    return writer.add_buffer(data)


def get_bytes(reader: Reader, entry: int | str) -> bytes | memoryview:
    """Returns the bytes of a header entry. Raises DecodeError, also for base64 that only a lenient reader accepts."""
    if isinstance(entry, str):
        data = a2b_base64(entry)
        # b64decode skips other characters, and has no strict mode before Python 3.11.
        if b2a_base64(data, newline=False).decode("ascii") != entry:
            raise DecodeError("bytes that are not base64")
        return data
    return reader.take_buffer(entry)


BYTES_ENTRY = (int, str)
