"""The frames between daemon and guest: a sans-IO codec that both ends use.

A frame is a kind, a sequence number, an acknowledgement, a small JSON head and a binary body:

    u32 length of what follows | u8 kind | u64 seq | u64 ack | u32 length of head | head (UTF-8 JSON object) | body

All integers are big-endian. `seq` numbers the frames that the sender keeps until the other side has acknowledged them
(0: not kept); `ack` is the highest `seq` that the sender of this frame has taken. docs/protocol.md lists the kinds.

The codec never trusts the other side. A length is checked before anything is allocated for it, a head is bounded and
must be an object, and every field is read through `Fields`, which raises FrameError unless it has the expected type
and range. A decoder that has raised can't be used again: the position in the stream is lost.
"""

from __future__ import annotations

import struct

from executor_api.limits import PIECE_BYTES

from .lean import NotJson, dumps, loads

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from .schema import Message

PROTOCOL_VERSION = 13
# Room for one message of a client, 4 MiB, which may be longer as JSON.
MAX_FRAME_BYTES = 8 * 1024 * 1024
MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = MAX_FRAME_BYTES - MAX_HEAD_BYTES - 1024
# Larger bodies travel as blobs, in pieces of this size (also the largest inline payload).
CHUNK_BYTES = PIECE_BYTES
# The most missing modules that the refusal of a registration of tools names.
MAX_MISSING_MODULES = 32

# The size of a frame of one piece, with its head; and the smallest rest of a frame worth reading straight into place.
_PLACE_BYTES = CHUNK_BYTES + MAX_HEAD_BYTES
_REST_BYTES = CHUNK_BYTES // 4

_HEADER = struct.Struct("!IBQQI")
_AFTER_LENGTH = _HEADER.size - 4


class Kind:
    """Frame kinds. Daemon to guest below 64, guest to daemon from 64."""

    HELLO = 1
    CONFIGURE = 2
    EXECUTE = 3
    CANCEL = 4
    TOOL_RESULT = 5
    REGISTER_TOOLS = 6
    SET_VARIABLES = 7
    GET_VARIABLES = 8
    BLOB_BEGIN = 9
    BLOB_DATA = 10
    FILE_PUT = 11
    FILE_GET = 12
    FILE_LIST = 13
    FILE_DATA = 14
    ACK = 15
    PING = 16
    SHUTDOWN = 17
    BLOB_DROP = 18
    RESTRICT = 19
    EXPORT_STATE = 20
    RESTORE_STATE = 21
    FIND_MODULES = 22
    TAKE_LISTENER = 23
    NOTE = 24
    START_PROCESS = 25
    WRITE_PROCESS = 26
    RESIZE_PROCESS = 27
    SIGNAL_PROCESS = 28
    GRANT_OUTPUT = 29
    FORGET_PROCESS = 30
    OPEN_PORT = 31
    PORT_INPUT = 32
    GRANT_PORT = 33
    CLOSE_PORT = 34
    WATCH_FILES = 35
    UNWATCH_FILES = 36
    NEXT_CHANGES = 37
    TAKE_SAVEPOINT = 38
    ROLL_BACK = 39
    LIST_SAVEPOINTS = 40
    MANAGE_FILE = 41
    HOLD = 42

    READY = 64
    LOG = 65
    OUTPUT_CUT = 66
    IMAGE = 67
    TOOL_CALL = 68
    BLOB_CHUNK = 69
    RESULT = 70
    DONE = 71
    FILE_CHUNK = 72
    PONG = 73
    LIMIT_WARNING = 74
    LISTENER = 75
    PROCESS_STARTED = 76
    PROCESS_OUTPUT = 77
    PROCESS_OUTPUT_CUT = 78
    PROCESS_ENDED = 79
    PORT_OUTPUT = 80
    FILES_CHANGED = 81


_KINDS = frozenset(value for name, value in vars(Kind).items() if name.isupper())
_NOTHING = memoryview(b"")


class FrameError(ValueError):
    """The other side sent an invalid frame."""


class Frame:
    """A decoded frame. `body` is a copy of its body.

    `view` is the body in place, `raw` the whole frame as received: both are valid until the decoder is fed again.
    """

    __slots__ = ("_body", "ack", "head", "kind", "message", "raw", "seq", "view")

    def __init__(
        self, kind: int, seq: int, ack: int, head: Fields, view: memoryview, raw: memoryview = _NOTHING
    ) -> None:
        self.kind = kind
        self.seq = seq
        self.ack = ack
        self.head = head
        self.view = view
        self.raw = raw
        self.message: Optional[Message] = None  # the head, once it was read (messages.py)
        self._body: Optional[bytes] = None

    @property
    def body(self) -> bytes:
        if self._body is None:
            self._body = bytes(self.view)
        return self._body


class Fields:
    """Typed, bounded access to a decoded head."""

    __slots__ = ("values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, max_chars: int = 4096, default: Optional[str] = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or len(value) > max_chars:
            raise FrameError(f"field {name} is not a text of at most {max_chars} characters")
        return value

    def integer(self, name: str, low: int = 0, high: int = 2**63 - 1, default: Optional[int] = None) -> int:
        value = self.values.get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise FrameError(f"field {name} is not an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float = 0.0, high: float = 1e12, default: Optional[float] = None) -> float:
        value = self.values.get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:  # nor is NaN
            raise FrameError(f"field {name} is not a number from {low} to {high}")
        return float(value)

    def boolean(self, name: str, default: Optional[bool] = None) -> bool:
        value = self.values.get(name, default)
        if type(value) is not bool:
            raise FrameError(f"field {name} is not a boolean")
        return value

    def texts(self, name: str, max_items: int, max_chars: int = 4096) -> list[str]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > max_items:
            raise FrameError(f"field {name} is not a list of at most {max_items}")
        if any(not isinstance(item, str) or len(item) > max_chars for item in value):
            raise FrameError(f"field {name} has an item that is not a text of at most {max_chars} characters")
        return value

    def objects(self, name: str, max_items: int) -> list[Fields]:
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) > max_items:
            raise FrameError(f"field {name} is not a list of at most {max_items}")
        if any(not isinstance(item, dict) for item in value):
            raise FrameError(f"field {name} has an item that is not an object")
        return [Fields(item) for item in value]

    def object(self, name: str) -> Optional[Fields]:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise FrameError(f"field {name} is not an object")
        return Fields(value)


def encode_head(head: dict[str, Any]) -> bytes:
    """Returns a head as bytes, ASCII only, so that lone surrogates survive. Asserts that it is not too long."""
    data = dumps(head)
    assert len(data) <= MAX_HEAD_BYTES, f"a head of {len(data)} bytes"
    return data


def decode_head(data: bytes) -> Fields:
    try:
        head = loads(data)
    except NotJson as error:
        raise FrameError("the head is not JSON") from error
    if not isinstance(head, dict):
        raise FrameError("the head is not an object")
    return Fields(head)


def encode_prefix(kind: int, head: dict[str, Any], body_bytes: int, seq: int = 0, ack: int = 0) -> bytes:
    """Returns a frame without its body, which is then sent from its place."""
    data = encode_head(head)
    length = _AFTER_LENGTH + len(data) + body_bytes
    assert length <= MAX_FRAME_BYTES, f"a frame of {length} bytes"
    return _HEADER.pack(length, kind, seq, ack, len(data)) + data


def encode_frame(kind: int, head: dict[str, Any], body: bytes = b"", seq: int = 0, ack: int = 0) -> bytes:
    return encode_prefix(kind, head, len(body), seq, ack) + body


class FrameDecoder:
    """Turns received bytes into frames. Holds at most one incomplete frame.

    A frame that arrives whole is not copied; the pieces of others are gathered. Only `kinds` are accepted.

    The caller may read a socket straight into the rest of a large frame: `space`, then `filled`. So a large body is
    copied only once, by the kernel. Memory for such a frame is allocated once its length is known, up to _PLACE_BYTES.
    Of a larger one only the received bytes are held, so that a length alone costs next to nothing.
    """

    def __init__(self, kinds: frozenset[int] = _KINDS) -> None:
        self._kinds = kinds
        self._gathered = bytearray()  # not a list of pieces: a sender could make one of each byte
        self._filled = 0  # bytes of it that have arrived
        self._needed = 0  # bytes of the incomplete frame; 4 until its length has arrived
        self._failed = False

    def feed(self, data: Union[bytes, memoryview]) -> list[Frame]:
        """Returns every frame that is complete now. Raises FrameError; then the decoder can't be used again."""
        assert not self._failed, "a failed decoder was fed"
        frames: list[Frame] = []
        view = memoryview(data)
        try:
            while view:
                frame, view = self._next(view)
                if frame is not None:
                    frames.append(frame)
        except FrameError:
            self._failed = True
            raise
        return frames

    def space(self, common: memoryview) -> memoryview:
        """Returns the place for the next bytes: the rest of a large frame, else `common`."""
        if self._needed == len(self._gathered) and self._needed - self._filled >= _REST_BYTES:
            return memoryview(self._gathered)[self._filled :]
        return common

    def filled(self, space: memoryview, size: int) -> list[Frame]:
        """As `feed`, with the first `size` bytes of the place that `space` returned."""
        if space.obj is not self._gathered:
            return self.feed(space[:size])
        self._filled += size
        if self._filled < self._needed:
            return []
        try:
            return [self._whole()]
        except FrameError:
            self._failed = True
            raise

    def _next(self, view: memoryview) -> tuple[Optional[Frame], memoryview]:
        """Returns at most one frame, and the bytes after it."""
        if not self._filled:
            needed = _needed(view)
            if len(view) >= needed > 4:
                return _parse(view[:needed], self._kinds), view[needed:]
            self._need(needed)
        missing = self._needed - self._filled
        piece, rest = view[:missing], view[missing:]
        self._gather(piece)
        if self._filled < self._needed:
            return None, rest
        if self._needed == 4:  # only its length was missing
            self._need(_needed(memoryview(self._gathered)))
            return None, rest
        return self._whole(), rest

    def _need(self, size: int) -> None:
        self._needed = size
        if 4 < size <= _PLACE_BYTES:
            place = bytearray(size)
            place[: self._filled] = self._gathered
            self._gathered = place

    def _gather(self, piece: memoryview) -> None:
        if len(self._gathered) == self._needed:
            self._gathered[self._filled : self._filled + len(piece)] = piece
        else:
            self._gathered += piece
        self._filled += len(piece)

    def _whole(self) -> Frame:
        whole, self._gathered, self._filled = self._gathered, bytearray(), 0
        return _parse(memoryview(whole), self._kinds)


def _needed(view: memoryview) -> int:
    """Returns the size of the first frame in bytes; 4 while its length has not arrived."""
    if len(view) < 4:
        return 4
    length = int.from_bytes(view[:4], "big")
    if not _AFTER_LENGTH <= length <= MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes")
    return 4 + length


def _parse(view: memoryview, kinds: frozenset[int]) -> Frame:
    """Reads a complete frame."""
    _, kind, seq, ack, head_length = _HEADER.unpack_from(view)
    if kind not in kinds:
        raise FrameError(f"unknown frame kind {kind}")
    start = _HEADER.size
    if head_length > MAX_HEAD_BYTES or start + head_length > len(view):
        raise FrameError(f"a head of {head_length} bytes")
    head = decode_head(bytes(view[start : start + head_length]))
    return Frame(kind, seq, ack, head, view[start + head_length :], view)
