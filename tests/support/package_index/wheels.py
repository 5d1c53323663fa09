"""Wheels made on the spot, entry by entry, so that a test can make one that no tool would."""

from __future__ import annotations

import base64
import hashlib
import io
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ANY = "py3-none-any"
"""The tag of wheels for every Python and platform."""

_ZIP_TIME = (2020, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Entry:
    """One entry of an archive, with the name as it is written there."""

    name: str
    content: bytes = b""
    mode: int = stat.S_IFREG | 0o644
    recorded: bool = True  # RECORD lists it

    @classmethod
    def link(cls, name: str, target: str) -> Entry:
        """A symbolic link, as zip archives have them."""
        return cls(name, target.encode(), stat.S_IFLNK | 0o777)


def make_wheel(
    project: str,
    version: str = "1.0",
    files: Mapping[str, str | bytes] | None = None,
    *,
    requires: Iterable[str] = (),
    scripts: Mapping[str, str] | None = None,
    extra: Sequence[Entry] = (),
    tag: str = ANY,
    requires_python: str = "",
    record: str | None = None,
) -> tuple[str, bytes]:
    """Returns the file name and the content of a wheel.

    `files` maps paths in it to contents; by default, it has one module of the project's name with `VERSION`. `scripts`
    maps console scripts to their entry points ("module:function"). `extra` are entries as they are. `record` stands in
    place of the true RECORD.
    """
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    if files is None:
        files = {f"{name}.py": f"VERSION = {version!r}\n"}
    entries = [Entry(path, text.encode() if isinstance(text, str) else text) for path, text in files.items()]
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    metadata += f"Requires-Python: {requires_python}\n" if requires_python else ""
    metadata += "".join(f"Requires-Dist: {each}\n" for each in requires)
    is_pure = "true" if tag.endswith("-any") else "false"
    entries += [
        Entry(f"{info}/METADATA", metadata.encode()),
        Entry(
            f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: {is_pure}\nTag: {tag}\n".encode()
        ),
    ]
    if scripts:
        lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
        entries.append(Entry(f"{info}/entry_points.txt", f"[console_scripts]\n{lines}".encode()))
    entries += extra
    record = _record(entries, info) if record is None else record
    return f"{name}-{version}-{tag}.whl", packed([*entries, Entry(f"{info}/RECORD", record.encode())])


def make_sdist(project: str, version: str = "1.0") -> tuple[str, bytes]:
    """Returns the file name and the content of a source distribution whose build would leave a trace."""
    import tarfile

    packed_bytes = io.BytesIO()
    with tarfile.open(fileobj=packed_bytes, mode="w:gz") as archive:
        for name, text in {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n",
            "setup.py": "open('/tmp/sdist-was-built', 'w').close()\nfrom setuptools import setup\nsetup()\n",
        }.items():
            member = tarfile.TarInfo(f"{project}-{version}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return f"{project}-{version}.tar.gz", packed_bytes.getvalue()


def packed(entries: Iterable[Entry]) -> bytes:
    """Returns an archive of these entries, in this order; a name may come twice."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry in entries:
            info = zipfile.ZipInfo(entry.name, _ZIP_TIME)
            info.filename = entry.name  # ZipInfo makes some names harmless
            info.external_attr = entry.mode << 16
            info.create_system = 3  # so that the mode counts
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, entry.content)
    return target.getvalue()


def _record(entries: Iterable[Entry], info: str) -> str:
    lines = []
    for entry in entries:
        if entry.recorded:
            digest = base64.urlsafe_b64encode(hashlib.sha256(entry.content).digest()).rstrip(b"=").decode()
            name = f'"{entry.name}"' if "," in entry.name else entry.name
            lines.append(f"{name},sha256={digest},{len(entry.content)}")
    return "\n".join([*lines, f"{info}/RECORD,,", ""])


_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")


def many_empty_files(wheel: bytes, count: int, directory: str) -> bytes:
    """Returns the wheel with so many empty files more. `zipfile` would take minutes for a million."""
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        kept = [(info.filename.encode(), archive.read(info)) for info in archive.infolist()]
    kept += [(f"{directory}/{index:07}".encode(), b"") for index in range(count)]
    local, central, at = bytearray(), bytearray(), 0
    for name, content in kept:
        crc, size, at = zlib.crc32(content), len(content), len(local)
        local += _LOCAL.pack(b"PK\3\4", 20, 0, 0, 0, 0x5021, crc, size, size, len(name), 0) + name + content
        central += _CENTRAL.pack(
            b"PK\1\2",
            0x031E,
            20,
            0,
            0,
            0,
            0x5021,
            crc,
            size,
            size,
            len(name),
            0,
            0,
            0,
            0,
            (stat.S_IFREG | 0o644) << 16,
            at,
        )
        central += name
    total, start = len(kept), len(local)
    end64 = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, total, total, len(central), start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(central), 1)
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    return bytes(local + central + end64 + locator + end)
