"""Bytes as lines of text, for a transport that carries only text: a command's standard input and output in a cloud.

Theory of operation. Such a stream is not to be trusted with bytes: a shell may print before the command does, a retry
may send a line twice, and text that passes through JSON, logs and line buffers may be cut, repeated or reordered.
So each line has a number and a checksum:

    SEQ CRC BASE64

SEQ counts from 1 in each direction of each connection; CRC is the CRC-32 of `SEQ ` and the raw bytes, as 8 hex digits;
all is ASCII, and a line ends with a line feed. A repeated line is ignored, so that sending may be repeated. Anything
else that is not exactly the next line ends the connection with LineError. The frames inside (frames.py) are sent again
over the next connection.

This guards against accidents only: anybody who can write lines can write valid ones. The frames are authenticated.
This module does no input or output, and must never know what it carries.
"""

from __future__ import annotations

from binascii import Error, a2b_base64, b2a_base64, crc32

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Union

START = "executor-relay/1"
"""With the nonce behind it, the line before the first line. Whatever comes before it is skipped."""

LINE_BYTES = 48 * 1024
"""Raw bytes in one line at most: 64 KiB as base64."""

PREAMBLE_BYTES = 64 * 1024
"""Bytes that may come before the start line, such as a shell's greeting."""

SOCKET_CLOSED, BAD_LINE, STREAM_CLOSED, NO_LISTENER, CANNOT_CONNECT = 0, 3, 4, 66, 75
"""Exit codes of the relay, the command that carries these lines; relay.py explains each."""

_SEQ_DIGITS = 15
_CRC_DIGITS = 8
_LINE_CHARS = _SEQ_DIGITS + 1 + _CRC_DIGITS + 1 + LINE_BYTES // 3 * 4 + len("\r")
# Characters of a refused line that the log shows.
_SHOWN_CHARS = 40


class LineError(Exception):
    """This is not the next line; the connection has to be closed."""


def start_line(nonce: str) -> bytes:
    """Returns the relay's first line. It begins with a line feed, because a shell's output may end without one."""
    return f"\n{START} {nonce}\n".encode("ascii")


def encode_lines(data: Union[bytes, bytearray, memoryview], first_seq: int) -> tuple[bytes, int]:
    """Returns the lines for `data`, numbered from `first_seq`, and the number of the next line."""
    lines = []
    view = memoryview(data)
    seq = first_seq
    for offset in range(0, len(view), LINE_BYTES):
        piece = view[offset : offset + LINE_BYTES]
        seq_text = b"%d " % seq
        lines.append(b"%s%08x %s" % (seq_text, crc32(piece, crc32(seq_text)), b2a_base64(piece)))
        seq += 1
    return b"".join(lines), seq


class LineDecoder:
    """Takes the stream in pieces of any size, and returns its bytes, each once and in order.

    It keeps at most one incomplete line. Once it has raised LineError, it always does.
    """

    def __init__(self, nonce: Optional[str] = None) -> None:
        """`nonce` is that of the start line; None if the lines begin at once."""
        self._start = None if nonce is None else f"{START} {nonce}".encode("ascii")
        self._skipped_bytes = 0
        self._partial = bytearray()
        self._last_seq = 0
        self._broken = ""

    @property
    def started(self) -> bool:
        """True once the start line has arrived."""
        return self._start is None

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the contents of the lines that are complete now. Raises LineError."""
        if self._broken:
            raise LineError(self._broken)
        try:
            return self._feed(data)
        except LineError as error:
            self._broken = str(error)
            self._partial = bytearray()
            raise

    def _feed(self, data: bytes) -> list[bytes]:
        pieces = []
        begin = 0
        while (end := data.find(b"\n", begin)) >= 0:
            self._keep(data, begin, end)
            begin = end + 1
            line, self._partial = bytes(self._partial), bytearray()
            piece = self._take(line[:-1] if line.endswith(b"\r") else line)
            if piece is not None:
                pieces.append(piece)
        self._keep(data, begin, len(data))
        return pieces

    def _keep(self, data: bytes, begin: int, end: int) -> None:
        """Adds to the incomplete line; checks the length before it copies anything."""
        size = len(self._partial) + end - begin
        if self._start is not None and self._skipped_bytes + size > PREAMBLE_BYTES:
            raise LineError(f"no start line within {PREAMBLE_BYTES} bytes")
        if self._start is None and size > _LINE_CHARS:
            raise LineError(f"a line of more than {_LINE_CHARS} characters")
        self._partial += memoryview(data)[begin:end]

    def _take(self, line: bytes) -> Optional[bytes]:
        """Returns the bytes of one line; None if it has none."""
        if self._start is not None:
            if line == self._start:
                self._start = None
            self._skipped_bytes += len(line) + 1
            return None
        if not line:
            return None
        seq, piece = _decode(line)
        if seq <= self._last_seq:
            return None
        if seq != self._last_seq + 1:
            raise LineError(f"line {seq} came after line {self._last_seq}")
        self._last_seq = seq
        return piece


def _decode(line: bytes) -> tuple[int, bytes]:
    """Returns the number and the bytes of a line, whose checksum is right. Raises LineError."""
    fields = line.split(b" ")
    if len(fields) != 3:
        raise LineError(f"not a line of the relay: {_shown(line)}")
    seq_text, crc_text, text = fields
    # isdigit() of bytes knows only ASCII; int() would take signs, underscores and blanks too.
    if not seq_text.isdigit() or len(seq_text) > _SEQ_DIGITS or seq_text.startswith(b"0"):
        raise LineError(f"not the number of a line: {_shown(seq_text)}")
    try:
        piece = a2b_base64(text)
    except Error as error:
        raise LineError(f"line {int(seq_text)} is not base64") from error
    # Characters outside of the alphabet would have been skipped silently.
    if b2a_base64(piece, newline=False) != text or not 0 < len(piece) <= LINE_BYTES:
        raise LineError(f"line {int(seq_text)} is not base64")
    if crc_text != b"%08x" % crc32(piece, crc32(seq_text + b" ")):
        raise LineError(f"line {int(seq_text)} was damaged on its way")
    return int(seq_text), piece


def _shown(text: bytes) -> str:
    return ascii(text[:_SHOWN_CHARS])
