"""Archives and names made to hurt who unpacks them: the client's machine, and the supervisor.

What the guest's own code writes is tested elsewhere; here the guest, the daemon or the tenant is the attacker.
"""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from executor_client import ProtocolError
from executor_client._core.archives import unpack
from executor_client._core.local import NewFile

MiB = 1 << 20


class Watched(io.BytesIO):
    """Remembers the longest piece that was read at once."""

    longest = 0

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.longest = max(self.longest, len(data))
        return data


def sealed(block: bytes | bytearray) -> bytes:
    """A header with its checksum put right."""
    blanked = bytes(block[:148]) + b" " * 8 + bytes(block[156:])
    return blanked[:148] + b"%06o\0 " % sum(blanked) + blanked[156:]


def head(name: str, kind: bytes = b"0", size: int | bytes = 0, **fields: Any) -> bytes:
    """A header; a size as bytes is put there as it is."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size if isinstance(size, int) else 0
    for key, value in fields.items():
        setattr(info, key, value)
    block = bytearray(info.tobuf(tarfile.USTAR_FORMAT))
    if isinstance(size, bytes):
        block[124:136] = size
    return sealed(block)


def pax(*records: bytes, size: int | bytes | None = None) -> bytes:
    data = b"".join(records)
    return head("PaxHeader", b"x", len(data) if size is None else size) + data + bytes(-len(data) % 512)


def record(key: bytes, value: bytes) -> bytes:
    rest = b" " + key + b"=" + value + b"\n"
    length = len(rest) + len(str(len(rest) + 3))
    return b"%d" % length + rest


def negative(number: int) -> bytes:
    return b"\xff" + (number % 2**88).to_bytes(11, "big")


END = bytes(1024)
SPARSE = sealed(bytearray(head("s", b"S"))[:482] + b"\1" + bytes(29))
MORE_SPARSE = (b"%011o\0" % 1 * 42 + b"\1").ljust(512, b"\0")

HOSTILE = {
    "a pax header of less than nothing": head("x", b"x", negative(-1024)) + bytes(4 * MiB),
    "a long name of less than nothing": head("x", b"L", negative(-(2**20))) + bytes(4 * MiB),
    "a file of less than nothing": head("f", b"0", negative(-1024)) + bytes(4 * MiB),
    "a file of more than 64 bits": head("f", b"0", b"\x80" + b"\xff" * 11) + END,
    "a pax size below zero": pax(record(b"size", b"-512")) + head("f") + END,
    "a pax size that is no number": pax(record(b"size", b"1e9")) + head("f") + END,
    "a pax size of many digits": pax(record(b"size", b"9" * 5000)) + head("f") + END,
    "a size twice": pax(record(b"size", b"1"), record(b"size", b"0")) + head("f") + END,
    "two pax headers": pax(record(b"path", b"a")) * 2 + head("f") + END,
    "a global header": head("x", b"g", 12) + record(b"path", b"a").ljust(512, b"\0") + head("f") + END,
    "a pax header of a pax header": pax(record(b"path", b"a")) + head("x", b"x") + head("f") + END,
    "a large pax header": pax(record(b"path", b"a" * 70_000)) + head("f") + END,
    "a record longer than its header": pax(b"999 path=a\n") + head("f") + END,
    "a record shorter than its key": pax(b"3 path=a\n") + head("f") + END,
    "an unending sparse map": SPARSE + MORE_SPARSE * (4 * MiB // 512),
    "a sparse map in the content": pax(record(b"GNU.sparse.major", b"1")) + head("f", size=4 * MiB) + b"9" * (4 * MiB),
    "a directory with content": head("d", b"5", 512) + bytes(512) + END,
    "a NUL in a long name": pax(record(b"path", b"a\0b")) + head("f") + END,
    "a long name that climbs out": pax(record(b"path", b"d/../../x")) + head("f") + END,
    "a prefix that climbs out": sealed(head("x")[:345] + b".." + bytes(165)) + END,
    "no name": head("") + END,
    "an empty long name": pax(record(b"path", b"")) + head("f") + END,
    "the directory itself": head(".", b"5") + END,
    "a file with a slash at its end": head("f/") + END,
    "a directory that is a file": head("d") + head("d", b"5") + END,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_forged_archive_is_refused_by_the_client_with_little_read_and_nothing_written(
    tmp_path: Path, what: str
) -> None:
    """Several of these make a tarfile of some Python read all at once, or not end."""
    archive = Watched(HOSTILE[what])
    with pytest.raises(ProtocolError):
        unpack(archive, tmp_path / "target")
    assert archive.longest <= 65_536
    assert list(tmp_path.iterdir()) == []


def test_a_name_as_long_as_a_name_can_be_is_written(tmp_path: Path) -> None:
    name = "\N{PILE OF POO}" * 63  # 252 bytes
    unpack(io.BytesIO(pax(record(b"path", name.encode())) + head("f") + END), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("through", ["itself", "a link"])
def test_what_is_no_file_is_not_replaced_by_one(tmp_path: Path, through: str) -> None:
    """`executor cp SESSION:x /dev/null` by root would leave the host with a file in its place."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    target = pipe
    if through == "a link":
        target = tmp_path / "link"
        target.symlink_to(pipe)
    with pytest.raises(FileExistsError, match="is not a regular file"):
        NewFile(target)
    with pytest.raises(FileExistsError, match="is not a regular file"):
        unpack(io.BytesIO(head(target.name) + END), tmp_path)
    assert pipe.is_fifo()
    assert {path.name for path in tmp_path.iterdir()} == {"pipe", target.name}


def test_a_missing_directory_is_named_as_the_caller_named_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        NewFile(tmp_path / "missing/file")
    assert caught.value.filename == str(tmp_path / "missing/file")


@pytest.mark.parametrize("step", [KeyboardInterrupt, OSError])
def test_an_end_in_the_middle_leaves_the_old_file_and_nothing_else(tmp_path: Path, step: type[BaseException]) -> None:
    (tmp_path / "f").write_text("old")
    with pytest.raises(step), NewFile(tmp_path / "f") as file:
        file.write(b"half")
        raise step
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"f": "old"}
