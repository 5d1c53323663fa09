"""Archives of chosen members, valid or not, and the content of an unpacked tree."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any


def archive(*members: tarfile.TarInfo, content: bytes = b"x", format: int = tarfile.PAX_FORMAT) -> bytes:
    """Regular files among the members have this content."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format) as tar:
        for member in members:
            if member.isreg():
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return raw.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def edited(seed: bytes, edits: list[tuple[int, int]]) -> bytes:
    """The archive with other bytes at these positions, and the checksums of the heads that they lie in."""
    data = bytearray(seed)
    for position, value in edits:
        data[position] = value
        block = position - position % 512
        data[block + 148 : block + 156] = b" " * 8
        data[block + 148 : block + 156] = b"%06o\0 " % sum(data[block : block + 512])
    return bytes(data)


def tree(directory: Path) -> dict[str, bytes | None]:
    """Returns the tree below a directory, by path: the bytes of files, and None for the rest."""
    found = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in found}
