"""Packs a value.

Encoding fails only for the size of a value, never for its type: a value without a form of its own goes to the
`fallback`, and without an answer from it gets a generic form or is represented by its repr.

Theory of operation. One loop, one stack, no recursion: the depth of a value is limited by `ValueLimits`, not by the
interpreter's stack. Each tagged node except "ref" takes the next number, in the order in which they begin. A value met
again becomes ["ref", number]. A mutable value can be referred to from inside itself; an immutable one only after it is
complete, because the decoder cannot have it earlier. Met again before that, it is written out once more; this ends at
the mutable value that every cycle of immutable ones contains.
"""

from __future__ import annotations

from collections import deque

from executor_api.values import containers, objects
from executor_api.values.decode import decode
from executor_api.values.limits import (
    COUNTED_TEXT_CHARS,
    DEFAULT_LIMITS,
    MAX_BARE_INT,
    MAX_INLINE_BYTES,
    MAX_UNFOLDING,
    VALUES_PER_NODE,
    DecodeError,
    EncodeError,
    OverLimit,
    ValueLimits,
    count_nodes,
)
from executor_api.values.lowering import loaded_libraries, lower_exact, lower_inexact
from executor_api.values.packing import BYTES_PER_BUFFER, HEAD_BYTES, pack_in_parts
from executor_api.values.tree import dump_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from executor_api.values.kinds import Lowered
    from executor_api.values.lowering import Modules
    from executor_api.values.packing import Parts

    Fallback = Callable[[object], "bytes | None"]
    StandIn = Callable[[object], Any]

_DIGEST_BYTES = 16


def encode(
    obj: object,
    limits: ValueLimits = DEFAULT_LIMITS,
    fallback: Fallback | None = None,
    passing: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    stand_in: StandIn | None = None,
) -> bytes:
    """Packs a value.

    `fallback` returns bytes for a value without an exact form (members of enums, dataclasses, named tuples, functions,
    instances of other classes, subclasses of builtins) and for containers beyond the limits; None, or no fallback,
    means the generic form or an OpaqueValue. Its exceptions pass through.

    `stand_in` is called with a value that would be an OpaqueValue. It returns display data (a dict), which is sent with
    the value's texts, or a value without children, such as an image, which is sent in its place; None if only the texts
    are to be sent.

    The code of a value (its `__repr__`, its properties) may raise anything, `SystemExit` too: that becomes part of the
    value's text, and other values are not lost. Exceptions of the types in `passing` pass through.

    Raises EncodeError when the packed value is larger than `limits.total_bytes`.
    """
    return b"".join(encode_in_parts(obj, limits, fallback, passing, stand_in))


def encode_in_parts(
    obj: object,
    limits: ValueLimits = DEFAULT_LIMITS,
    fallback: Fallback | None = None,
    passing: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
    stand_in: StandIn | None = None,
) -> Parts:
    """Packs like `encode`, without copying the large parts of the value: it must not change until they are used."""
    encoder = _Encoder(limits, fallback, passing, stand_in, trust_keys=True)
    parts = encoder.run(obj)
    if encoder.has_doubtful_keys and not _is_decodable(b"".join(parts), limits):
        parts = _Encoder(limits, fallback, passing, stand_in, trust_keys=False).run(obj)
    return parts


def digest(
    obj: object,
    limits: ValueLimits,
    fallback: Fallback,
    passing: tuple[type[BaseException], ...] = (KeyboardInterrupt,),
) -> bytes:
    """Returns a digest of what `encode` would pack, without a copy of it. It stays equal while the value is unchanged.

    It finds ordinary changes, but not those made to be missed: of large parts of a value, it has the CRC-32. Raises
    EncodeError as `encode` does.
    """
    return _Encoder(limits, fallback, passing, trust_keys=True).digest(obj)


def _is_decodable(packed: bytes, limits: ValueLimits) -> bool:
    # Objects that were different keys may have equal forms, or forms without a hash: the decoder finds out.
    try:
        decode(packed, limits, foreign=lambda data: object())
    except DecodeError:
        return False
    return True


class _Encoder:
    def __init__(
        self,
        limits: ValueLimits,
        fallback: Fallback | None,
        passing: tuple[type[BaseException], ...],
        stand_in: StandIn | None = None,
        *,
        trust_keys: bool,
    ) -> None:
        self.limits = limits
        self.passing = passing
        self.has_doubtful_keys = False
        self._fallback = fallback
        self._stand_in: StandIn = stand_in or (lambda value: None)
        self._trust_keys = trust_keys
        self._buffers: list[bytes | memoryview] = []
        self._total_bytes = HEAD_BYTES
        self._text_chars = 0  # in the tree, so far
        self._pixels_left = limits.image_pixels
        self._labels_left = limits.total_bytes
        self._nodes = 1
        self._surplus = 0
        self._unfolded = 0
        self._max_unfolded = MAX_UNFOLDING * limits.nodes
        self._unfolded_bytes = 0
        self._left_out_text = ""
        self._libraries: Modules | None = None
        # By id, the number of the node of a value, and the value itself: while it is here, no other has its id.
        self._numbers: dict[int, tuple[int, object]] = {}
        # By number, how many nodes a complete node stands for, and how many bytes, references followed.
        self._weights: dict[int, tuple[int, int]] = {}
        # By id, how many nodes of an immutable value have begun and are not complete.
        self._begun: dict[int, int] = {}

    def run(self, root: object) -> Parts:
        tree = dump_tree(self._write(root))
        self._text_chars = 0  # they are in the tree
        self._count_bytes(len(tree))
        return pack_in_parts(tree, self._buffers)

    def digest(self, root: object) -> bytes:
        from hashlib import blake2b  # not at the start of a sandbox
        from zlib import crc32  # three times as fast, for the bulk of a large value

        hashed = blake2b(dump_tree(self._write(root)), digest_size=_DIGEST_BYTES)
        for data in self._buffers:
            view = memoryview(data)
            if view.nbytes:
                hashed.update(b"%d %d " % (view.nbytes, crc32(view.cast("B"))))
        return hashed.digest()

    # Used by the functions that lower values (kinds.Writer)

    def add_buffer(self, data: bytes | memoryview) -> int:
        if len(self._buffers) >= self.limits.nodes:  # a node of texts has two, and receivers allow one for each node
            raise EncodeError(
                f"the value needs more than {self.limits.nodes} buffers, the limit nodes: send a part of it"
            )
        size = memoryview(data).nbytes
        self._count_bytes(size + BYTES_PER_BUFFER)
        self._unfolded_bytes += size
        self._buffers.append(data)
        return len(self._buffers) - 1

    def expect_bytes(self, count: int) -> None:
        """Raises EncodeError if `count` more bytes don't fit, before anything is copied."""
        needed = self._total_bytes + self._text_chars + count
        if needed > self.limits.total_bytes:
            raise EncodeError(
                f"the value takes {needed} bytes or more, over the limit total_bytes of "
                f"{self.limits.total_bytes}: send a part of it, or write it to a file"
            )

    def add_unfolded(self, count: int) -> None:
        self._unfolded += count

    def add_unfolded_bytes(self, count: int) -> None:
        self._unfolded_bytes += count

    def take_pixels(self, count: int) -> bool:
        if count > self._pixels_left:
            return False
        self._pixels_left -= count
        return True

    def take_labels(self, count: int) -> bool:
        if count > self._labels_left:
            return False
        self._labels_left -= count
        return True

    def libraries(self) -> Modules:
        """Returns `loaded_libraries()` as it was when the first value was met that may be a library's."""
        if self._libraries is None:
            self._libraries = loaded_libraries()
        return self._libraries

    def _count_bytes(self, count: int) -> None:
        self.expect_bytes(count)
        self._total_bytes += count

    def _count_text(self, chars: int) -> None:
        self.expect_bytes(chars)
        self._text_chars += chars
        self._unfolded_bytes += chars

    # The loop

    def _write(self, root: object) -> Any:
        top: list[Any] = []
        numbers = self._numbers
        count = 0
        stack: list[Any] = [(iter((root,)), top, None, -1, False, 0, 0)]
        while stack:
            values, out, owner, number, is_mutable, unfolded_before, bytes_before = stack[-1]
            for value in values:
                kind = type(value)
                if kind is str and len(value) <= MAX_INLINE_BYTES and value.isascii():
                    if len(value) > COUNTED_TEXT_CHARS:
                        self._count_text(len(value))
                    out.append(value)
                    continue
                if kind is int:
                    if -MAX_BARE_INT <= value <= MAX_BARE_INT:
                        out.append(value)
                        continue
                elif kind is float:
                    if value - value == 0.0:
                        out.append(value)
                        continue
                elif value is None or kind is bool:
                    out.append(value)
                    continue
                known = numbers.get(id(value))
                if known is not None and self._may_refer(known[0]):
                    out.append(["ref", known[0]])
                    continue
                before, bytes_then = self._unfolded, self._unfolded_bytes
                node, children, mutable = self._lower(value, kind, depth=len(stack), is_known=known is not None)
                out.append(node)
                if type(node) is not list:
                    continue
                if mutable or not children:
                    numbers[id(value)] = (count, value)
                if not children:
                    self._weights[count] = self._unfolded - before, self._unfolded_bytes - bytes_then
                else:
                    if not mutable:
                        self._begun[id(value)] = self._begun.get(id(value), 0) + 1
                    stack.append((iter(children), node, value, count, mutable, self._unfolded, bytes_then))
                    self._unfolded += len(children)
                count += 1
                if children:
                    break
            else:
                stack.pop()
                if number >= 0:
                    self._weights[number] = self._unfolded - unfolded_before, self._unfolded_bytes - bytes_before
                    if not is_mutable:
                        numbers[id(owner)] = (number, owner)
                        self._begun[id(owner)] -= 1
        return top[0]

    def _may_refer(self, number: int) -> bool:
        nodes, size = self._weights.get(number, (0, 0))
        nodes += self._unfolded
        size += self._unfolded_bytes
        if nodes > self._max_unfolded or size > self.limits.unfolded_bytes:
            return False
        self._unfolded, self._unfolded_bytes = nodes, size
        return True

    # Choosing the form of a value

    def _lower(self, value: object, kind: type, *, depth: int, is_known: bool) -> Lowered:
        try:
            return self._lower_within(value, kind, depth=depth, is_known=is_known)
        except OverLimit as over:
            return self._foreign(value) or self._opaque(value, f"<not sent as a value: {over}>\n")

    def _lower_within(self, value: object, kind: type, *, depth: int, is_known: bool) -> Lowered:
        if is_known and self._unfolded_bytes + self._weights.get(self._numbers[id(value)][0], (0, 0))[1] > (
            self.limits.unfolded_bytes
        ):
            return self._foreign(value) or self._left_out(value)
        if is_known or self._begun.get(id(value), 0) > 1:
            return self._inexact(value)
        for base in _SIZED if issubclass(kind, _SIZED) else ():
            if issubclass(kind, base):
                count = base.__len__(value)
                self.expect_bytes(count)
                self._expect_nodes(count if base in _OF_NODES else 0)
        lowered = self._lowered_by(lower_exact, value, kind)
        if lowered is None:
            if self._fallback is not None:
                foreign = self._foreign(value)
                if foreign is not None:
                    return foreign
            lowered = self._lowered_by(lower_inexact, value, kind)
        if lowered is None:
            return self._shown(value)
        node, children, _ = lowered
        if type(node) is not list:
            return lowered
        values, chars = _measure(node)
        self._count_text(chars)
        surplus = values - VALUES_PER_NODE
        if surplus > 0:
            if self._surplus + surplus > self.limits.nodes:
                return self._inexact(value)
            self._surplus += surplus
        nodes = count_nodes(node[0], len(children))
        self._expect_nodes(nodes)
        if children:
            if depth > self.limits.depth:
                raise OverLimit(f"it is deeper than the limit of {self.limits.depth}")
            if node[0] in containers.KEYED_TAGS and not _has_plain_keys(node[0], children):
                if not self._trust_keys:
                    return self._inexact(value)
                self.has_doubtful_keys = True
        self._nodes += nodes
        return lowered

    def _expect_nodes(self, count: int) -> None:
        if self._nodes + count > self.limits.nodes:
            raise OverLimit(
                f"with it, the whole has more than the limit of {self.limits.nodes:,} nodes; send a part of it"
            )

    def _lowered_by(self, lower: Callable[..., Lowered | None], value: object, kind: type) -> Lowered | None:
        try:
            return lower(value, kind, self)
        except (EncodeError, OverLimit):
            raise
        except self.passing:
            raise
        except BaseException:  # noqa: BLE001 - a value that can't be read, by a library or its own code, shows its repr
            return None

    def _inexact(self, value: object) -> Lowered:
        return self._foreign(value) or self._opaque(value)

    def _shown(self, value: object) -> Lowered:
        data: Any = self._lowered_by(lambda value, *_: self._stand_in(value), value, type(value))
        if data is None or type(data) is dict:
            return self._opaque(value, display=data)
        return self._lowered_by(lower_exact, data, type(data)) or self._opaque(value)

    def _opaque(self, value: object, reason: str = "", display: dict[str, str] | None = None) -> Lowered:
        opaque = objects.make_opaque(value, self.limits.repr_chars, self.passing, reason, display)
        node = objects.lower_opaque(opaque, self)[0]
        self._count_text(_measure(node)[1])
        return node, (), False

    def _left_out(self, value: object) -> Lowered:
        """Replaces a value that was sent before, and that would make the text of the whole too long."""
        reason = f"<left out: shared so often, the whole would unfold to more than {self.limits.unfolded_bytes} bytes>"
        reason, self._left_out_text = self._left_out_text or reason, "<left out, as above>"
        node = ["opaque", objects.type_name_of(type(value)), reason]
        self._count_text(_measure(node)[1])
        return node, (), False

    def _foreign(self, value: object) -> Lowered | None:
        data = None if self._fallback is None else self._fallback(value)
        return None if data is None else (["foreign", self.add_buffer(data)], (), False)


def _measure(node: list[Any]) -> tuple[int, int]:
    """Counts the JSON values of a header, and the characters of its texts without the tag."""
    values, chars = 1, -len(node[0])
    pending = [node]
    while pending:
        entries = pending.pop()
        values += len(entries)
        for entry in entries:
            if type(entry) is str:
                chars += len(entry)
            elif type(entry) is list:
                pending.append(entry)
    return values, chars


def _has_plain_keys(tag: str, children: Sequence[object]) -> bool:
    """True when keys that must be hashable and different are certainly so again after decoding."""
    for key in containers.keys_of(tag, children):
        for part in key if type(key) is tuple else (key,):
            if id(type(part)) not in _PLAIN_KEY_IDS:
                return False
    return True


# Each item of these types takes at least one byte, in every form; and one node, if no form puts many items into one.
_OF_NODES: tuple[Any, ...] = (tuple, dict, set, frozenset, deque)
_SIZED: tuple[Any, ...] = (str, bytes, bytearray, list, *_OF_NODES)
# By id: a class can have a metaclass without a hash.
_PLAIN_KEY_IDS = frozenset(map(id, containers.PLAIN_KEYS))
