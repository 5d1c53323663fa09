"""Decodes a packed value. The bytes may come from an attacker.

Nothing that the bytes name is executed: no class is looked up, no module imported except numpy, pandas, Pillow and the
standard library's own, nothing unpickled or evaluated. For any bytes, decoding returns a value or raises DecodeError,
within the time and the memory that the limits allow.

Theory of operation. The JSON tree is walked with one loop and one stack (see encode.py for the numbering of nodes). A
node's tag is looked up in one table, which gives the number and types of its parts; the children are decoded first,
then the value is made from them. Mutable values are made empty before their children, so that these can refer to them.
"""

from __future__ import annotations

from executor_api.values import containers, objects, scalars, times
from executor_api.values.kinds import Kind, NoneType
from executor_api.values.limits import (
    COUNTED_TEXT_CHARS,
    DEFAULT_LIMITS,
    MAX_UNFOLDING,
    DecodeError,
    ValueLimits,
    count_nodes,
)
from executor_api.values.packing import unpack
from executor_api.values.tree import load_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Foreign = Callable[[memoryview], object]

_INCOMPLETE = object()
_SCALARS = frozenset([str, int, float, bool, NoneType])
KINDS: dict[str, Kind] = {
    **scalars.KINDS,
    **times.KINDS,
    **containers.KINDS,
    **objects.KINDS,
}
_of_libraries: dict[str, Kind] = {}


def decode(
    packed: bytes | bytearray | memoryview,
    limits: ValueLimits = DEFAULT_LIMITS,
    foreign: Foreign | None = None,
    *,
    needs_libraries: bool = False,
) -> Any:
    """Returns the value that was encoded. Raises DecodeError.

    `foreign` makes the values that the sender's fallback wrote; without it they are refused. Where pandas is missing, a
    table is an OpaqueValue or, with `needs_libraries`, a DecodeError that names pandas; arrays and images likewise.
    """
    size = memoryview(packed).nbytes
    if size > limits.total_bytes:
        raise DecodeError(f"a packed value of {size} bytes is over the limit total_bytes of {limits.total_bytes}")
    tree, buffers = unpack(packed, limits)
    text = bytes(tree)
    # The tag may be written with an escape.
    has_references = b'"ref"' in text or b"\\u" in text
    decoder = _Decoder(limits, buffers, foreign, needs_libraries=needs_libraries, has_references=has_references)
    root = load_tree(text, limits)
    try:
        return decoder.read(root)
    except DecodeError:
        raise
    except Exception as error:
        # A node can be wrong in any way, and Python or a library may raise anything for it.
        raise DecodeError(f"the value is malformed: {type(error).__name__}: {error}") from error


class _Decoder:
    def __init__(
        self,
        limits: ValueLimits,
        buffers: list[memoryview],
        foreign: Foreign | None,
        *,
        needs_libraries: bool,
        has_references: bool,
    ) -> None:
        self.limits = limits
        # Without references, a value has no more bytes than its packed form; nothing needs to be counted then.
        self._has_references = has_references
        self._unfolded_bytes = 0
        self.foreign = foreign
        self.needs_libraries = needs_libraries
        self.dtypes: dict[str, Any] = {}
        self._buffers: list[memoryview | None] = list(buffers)
        self._pixels_left = limits.image_pixels
        self._labels_left = limits.total_bytes
        self._nodes = 1
        self._unfolded = 0
        self._values: list[Any] = []
        self._weights: list[tuple[int, int]] = []  # nodes and bytes, references followed

    # Used by the functions that make values (kinds.Reader)

    def take_buffer(self, number: int) -> memoryview:
        if not 0 <= number < len(self._buffers):
            raise DecodeError(f"there is no buffer {number}")
        buffer, self._buffers[number] = self._buffers[number], None
        if buffer is None:
            raise DecodeError(f"buffer {number} is used twice")
        self._unfolded_bytes += len(buffer)
        return buffer

    def add_unfolded(self, count: int) -> None:
        self._unfolded += count

    def add_unfolded_bytes(self, count: int) -> None:
        self._unfolded_bytes += count

    def take_pixels(self, count: int) -> None:
        self._pixels_left -= count
        if self._pixels_left < 0:
            raise DecodeError(f"the images have more than the limit of {self.limits.image_pixels} pixels")

    def take_labels(self, count: int) -> None:
        self._labels_left -= count
        if self._labels_left < 0:
            raise DecodeError("the indexes of the value have too many labels")

    # The loop

    def read(self, root: Any) -> Any:
        top: list[Any] = []
        stack: list[Any] = [(iter((root,)), top, None, None, None, -1, (0, 0))]
        while stack:
            nodes, out, kind, header, shell, number, before = stack[-1]
            for node in nodes:
                if type(node) is not list:
                    if type(node) is dict:
                        raise DecodeError("the tree holds a JSON object")
                    out.append(node)
                    continue
                if node and node[0] == "ref":
                    out.append(self._referred(node))
                    continue
                entered = self._enter(node, out, len(stack))
                if entered is not None:
                    stack.append(entered)
                    break
            else:
                stack.pop()
                if number >= 0:
                    value = kind.build(self, shell, out, header)
                    self._values[number] = value
                    self._weights[number] = self._unfolded - before[0], self._unfolded_bytes - before[1]
                    stack[-1][1].append(value)
        return top[0]

    def _enter(self, node: list[Any], out: list[Any], depth: int) -> Any:
        """Begins a node: makes its value if no child needs decoding, else returns its entry for the stack."""
        tag = node[0] if node else None
        kind = KINDS.get(tag) or _find_kind(tag) if type(tag) is str else None
        if kind is None:
            raise DecodeError("the tree holds a node with an unknown tag")
        header, children = kind.split(node)
        number, before = len(self._values), (self._unfolded, self._unfolded_bytes)
        if self._has_references:
            self._unfolded_bytes += _text_chars(header) + sum(
                len(child) for child in children if type(child) is str and len(child) > COUNTED_TEXT_CHARS
            )
        shell = None if kind.open is None else kind.open(*header)
        self._nodes += count_nodes(node[0], len(children))
        if self._nodes > self.limits.nodes:
            raise DecodeError(f"the value has more than the limit of {self.limits.nodes} nodes")
        if children:
            if depth > self.limits.depth:
                raise DecodeError(f"the value is deeper than the limit of {self.limits.depth}")
            self._unfolded += len(children)
            if not _SCALARS.issuperset(map(type, children)):
                self._values.append(_INCOMPLETE if shell is None else shell)
                self._weights.append((0, 0))
                return iter(children), [], kind, header, shell, number, before
        value = kind.build(self, shell, children, header)
        self._values.append(value)
        self._weights.append((self._unfolded - before[0], self._unfolded_bytes - before[1]))
        out.append(value)
        return None

    def _referred(self, node: list[Any]) -> Any:
        number = node[1] if len(node) == 2 else None
        if type(number) is not int or not 0 <= number < len(self._values):
            raise DecodeError("a reference leads nowhere")
        value = self._values[number]
        if value is _INCOMPLETE:
            raise DecodeError("a reference leads to a value that is not complete")
        nodes, size = self._weights[number]
        self._unfolded += nodes
        self._unfolded_bytes += size
        if self._unfolded > MAX_UNFOLDING * self.limits.nodes:
            raise DecodeError("the references of the value unfold to too many values")
        if self._unfolded_bytes > self.limits.unfolded_bytes:
            raise DecodeError(f"the references of the value unfold to more than {self.limits.unfolded_bytes} bytes")
        return value


def _find_kind(tag: str) -> Kind | None:
    """Loads the kinds of libraries' values at the first tag that is not in KINDS."""
    if not _of_libraries:
        from executor_api.values import arrays, frames, images

        _of_libraries.update({**arrays.KINDS, **frames.KINDS, **images.KINDS})
    return _of_libraries.get(tag)


def _text_chars(header: list[Any]) -> int:
    chars, pending = 0, [header]
    while pending:
        for entry in pending.pop():
            if type(entry) is str:
                chars += len(entry)
            elif type(entry) is list:
                pending.append(entry)
    return chars
