"""The headers of tar archives: POSIX ustar, and the pax headers for what it has no room for.

Both ends of a transfer write archives with `header`, and read them with `parse_header` and `parse_records`. No I/O: the
caller fetches each block, and decides what it does with a member. Reading trusts nothing, since the other end may be an
attacker: a header that is damaged raises TarError, and no length is used before it is checked.

The two ends differ in what they accept, so reading has two strengths. The sandbox takes the archives of every tar (v7,
GNU, pax). The client, whose disk is at stake, is `strict`: it takes what `header` writes, and nothing else. tarfile is
unsuitable for that. It knows every dialect, and a forged header can make it read a whole archive at once (a size below
zero), loop, or collect a sparse map of gigabytes; it depends on Python's version which of these are fixed.

Standard library only, for CPython 3.9 and later: the guest has this too, and imports it with the first archive.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container
    from typing import Optional

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
PAX_BYTES_MAX = 64 * 1024
"""Bytes of one pax header that a reader accepts: a path is far shorter."""

_MAGIC = b"ustar\0"
_MAX_OCTAL_SIZE = 8**11 - 1
_NAME_BYTES = 100
# Digits of a number in a pax header.
_MAX_DIGITS = 18


class TarError(Exception):
    """This is not a tar archive, or a damaged one, or one of a dialect that is not accepted."""


def padding(size: int) -> int:
    """Returns the number of bytes from the end of a content to the next whole block."""
    return -size % BLOCK_BYTES


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def header(name: str, kind: bytes, mode: int, size: int, modified: float) -> bytes:
    """Returns a member's header, after a pax header for what does not fit. Raises UnicodeEncodeError."""
    data = name.encode()
    records = b""
    if len(data) > _NAME_BYTES or not name.isascii():
        records += _record(b"path", data)
    if size > _MAX_OCTAL_SIZE:
        records += _record(b"size", b"%d" % size)
    short = name.encode("ascii", "replace")[-_NAME_BYTES:]
    if not records:
        return _block(short, kind, mode, size, modified)
    extension = _block(b"PaxHeader", b"x", 0o644, len(records), modified) + records + bytes(padding(len(records)))
    return extension + _block(short, kind, mode, min(size, _MAX_OCTAL_SIZE), modified)


def _record(key: bytes, value: bytes) -> bytes:
    """Returns a pax record: its own length in decimal, which counts itself, then key and value."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def _block(name: bytes, kind: bytes, mode: int, size: int, modified: float) -> bytes:
    mtime = min(max(int(modified), 0), _MAX_OCTAL_SIZE)
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, mtime)
    fields = name.ljust(_NAME_BYTES, b"\0") + numbers + b" " * 8 + kind + bytes(100) + _MAGIC + b"00"
    block = fields.ljust(BLOCK_BYTES, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def parse_header(block: bytes, *, strict: bool = False) -> tuple[bytes, bytes, int, int]:
    """Returns (kind, name, size, mode) of a header. `strict` takes ustar with octal numbers only."""
    is_ustar = block[257:263] == _MAGIC
    if strict and not is_ustar:
        raise TarError("a header is damaged, or of another format")
    number = _octal if strict else _number
    blanked = block[:148] + b" " * 8 + block[156:]
    if number(block[148:156]) != sum(blanked):
        raise TarError("this is not a tar archive, or one that was damaged")
    name = block[:_NAME_BYTES].split(b"\0", 1)[0]
    if is_ustar:  # in GNU's own format other fields stand in place of the prefix
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return block[156:157], name, number(block[124:136]), number(block[100:108])


def _number(field: bytes) -> int:
    """Reads a number of a header: octal digits or, as GNU writes a large one, binary."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise TarError("this is not a tar archive, or one that was damaged")
    return int(digits or b"0", 8)


def _octal(field: bytes) -> int:
    """Reads a number of a header as POSIX has it: octal digits, then a space or NUL."""
    digits = field.rstrip(b" \0")
    if not digits or len(digits) == len(field) or digits.strip(b"01234567"):
        raise TarError("a header has a damaged number")
    return int(digits, 8)


def parse_records(data: bytes, only: Optional[Container[str]] = None) -> dict[str, bytes]:
    """Returns the records of a pax header. With `only`, refuses other keys, and repeated ones."""
    records: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + _MAX_DIGITS + 1)
        end = start + decimal(data[start : max(space, start)])
        raw, equals, value = data[space + 1 : end].partition(b"=")
        if end > len(data) or not equals or not value.endswith(b"\n"):
            raise TarError("the archive has a damaged pax header")
        key = raw.decode("utf-8", "replace")
        if only is not None and (key not in only or key in records or data[start : start + 1] == b"0"):
            raise TarError("a pax header says what none should")
        records[key] = value[:-1]
        start = end
    return records


def decimal(digits: bytes) -> int:
    """Reads a number of a pax header."""
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise TarError("the archive has a damaged pax header")
    return int(digits)
