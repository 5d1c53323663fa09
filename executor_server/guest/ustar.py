"""The headers of tar archives: POSIX ustar, and the pax headers for what it has no room for.

Reading trusts nothing: whatever is no header raises PathRefused.
"""

from __future__ import annotations

from .workspace import PathRefused

BLOCK_BYTES = 512
END = bytes(2 * BLOCK_BYTES)
_MAX_OCTAL_SIZE = 8**11 - 1
_NAME_BYTES = 100
# Of a number in a pax header.
_MAX_DIGITS = 18


def padding(size: int) -> int:
    """How many bytes are missing to a whole block."""
    return -size % BLOCK_BYTES


def header(name: str, kind: bytes, mode: int, size: int, modified: float) -> bytes:
    """A member's header, after one with what does not fit into it."""
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
    """A pax record: its own length in decimal, which counts itself, then what it says."""
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + 1
    while len(b"%d" % length) + len(rest) != length:
        length = len(b"%d" % length) + len(rest)
    return b"%d" % length + rest


def _block(name: bytes, kind: bytes, mode: int, size: int, modified: float) -> bytes:
    mtime = min(max(int(modified), 0), _MAX_OCTAL_SIZE)
    numbers = b"%07o\0%07o\0%07o\0%011o\0%011o\0" % (mode, 0, 0, size, mtime)
    fields = name.ljust(_NAME_BYTES, b"\0") + numbers + b" " * 8 + kind + bytes(100) + b"ustar\x0000"
    block = fields.ljust(BLOCK_BYTES, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def read_block(block: bytes) -> tuple[bytes, bytes, int, int]:
    """(kind, name, size, mode) of a header. Raises PathRefused for what is none."""
    blanked = block[:148] + b" " * 8 + block[156:]
    if _number(block[148:156]) != sum(blanked):
        raise PathRefused("this is not a tar archive, or one that was damaged")
    name = block[:_NAME_BYTES].split(b"\0", 1)[0]
    if block[257:263] == b"ustar\0":  # where GNU has its own format, other things stand in this place
        prefix = block[345:500].split(b"\0", 1)[0]
        name = prefix + b"/" + name if prefix else name
    return block[156:157], name, _number(block[124:136]), _number(block[100:108])


def _number(field: bytes) -> int:
    """A number of a header: octal digits or, as GNU has it for large ones, binary."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.split(b"\0", 1)[0].strip(b" ")
    if digits.strip(b"01234567"):
        raise PathRefused("this is not a tar archive, or one that was damaged")
    return int(digits or b"0", 8)


def read_records(data: bytes) -> dict[str, bytes]:
    """The records of a pax header."""
    records: dict[str, bytes] = {}
    start = 0
    while start < len(data):
        space = data.find(b" ", start, start + _MAX_DIGITS + 1)
        end = start + decimal(data[start : max(space, start)])
        key, equals, value = data[space + 1 : end].partition(b"=")
        if end > len(data) or not equals or not value.endswith(b"\n"):
            raise PathRefused("the archive has a damaged pax header")
        records[key.decode("utf-8", "replace")] = value[:-1]
        start = end
    return records


def decimal(digits: bytes) -> int:
    if not digits.isdigit() or len(digits) > _MAX_DIGITS:
        raise PathRefused("the archive has a damaged pax header")
    return int(digits)
