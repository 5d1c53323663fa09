"""The headers of archives: what one end writes, both read; what other tars write, only the sandbox reads."""

from __future__ import annotations

import tarfile

import pytest

from executor_api.tar import BLOCK_BYTES, TarError, decimal, header, parse_header, parse_records

ONLY = ("path", "size")


def read(data: bytes, *, strict: bool) -> tuple[bytes, str, int, int]:
    """Reads a header, and the pax header before it if there is one."""
    kind, name, size, mode = parse_header(data[:BLOCK_BYTES], strict=strict)
    records: dict[str, bytes] = {}
    if kind == b"x":
        records = parse_records(data[BLOCK_BYTES : BLOCK_BYTES + size], ONLY if strict else None)
        kind, name, size, mode = parse_header(data[-BLOCK_BYTES:], strict=strict)
    return kind, records.get("path", name).decode(), decimal(records["size"]) if "size" in records else size, mode


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["a", "d/" * 50 + "a", "d/" * 49 + "é", "x" * 3000, "\N{PILE OF POO}" * 40])
@pytest.mark.parametrize("size", [0, 8**11 - 1, 8**11, 10**15])
def test_what_is_written_is_read_at_both_ends(name: str, size: int, strict: bool) -> None:
    assert read(header(name, b"0", 0o755, size, -1.5), strict=strict) == (b"0", name, size, 0o755)


def test_what_python_reads_is_what_was_written() -> None:
    info = tarfile.TarInfo.frombuf(header("d/", b"5", 0o755, 0, 1.5e9), "utf-8", "strict")
    assert (info.name, info.isdir(), info.mode, info.mtime) == ("d", True, 0o755, 1.5e9)


@pytest.mark.parametrize("other", ["gnu", "v7"])
def test_only_the_sandbox_reads_other_formats(other: str) -> None:
    block = tarfile.TarInfo("f").tobuf(tarfile.GNU_FORMAT if other == "gnu" else tarfile.USTAR_FORMAT)
    if other == "v7":  # the format without a magic
        blanked = block[:148] + b" " * 8 + block[156:257] + bytes(BLOCK_BYTES - 257)
        block = blanked[:148] + b"%06o\0 " % sum(blanked) + blanked[156:]
    assert parse_header(block)[1] == b"f"
    with pytest.raises(TarError, match="another format"):
        parse_header(block, strict=True)


@pytest.mark.parametrize("data", [b"11 mtime=1\n", b"12 comment=\n", b"8 path=\n" * 2, b"010 path=\n"])
def test_only_the_sandbox_takes_records_that_are_not_written_here(data: bytes) -> None:
    assert parse_records(data)
    with pytest.raises(TarError, match="what none should"):
        parse_records(data, ONLY)
