"""The stream of bytecode: it lands beside the sources of its own environment, or nowhere."""

from __future__ import annotations

import importlib.util
import os
import py_compile
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_server.packages.bytecode import MAX_PIECE_BYTES, BytecodeRefused, BytecodeWriter
from tests.support.rounds import rounds

TAG = "cpython-312"
MAGIC = importlib.util.MAGIC_NUMBER


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    (site / "package/below").mkdir(parents=True)
    for name in ("package/__init__.py", "package/below/module.py", "single.py"):
        (site / name).write_text(f"NAME = {name!r}\n")
    return site


@pytest.fixture
def site_fd(site: Path) -> Iterator[int]:
    fd = os.open(site, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def compiled(source: Path, *, magic: bytes = MAGIC, flags: int = 0, size_more: int = 0) -> bytes:
    found = source.stat()
    head = struct.pack("<4sIII", magic, flags, int(found.st_mtime) & 0xFFFFFFFF, found.st_size + size_more)
    return head + b"code"


def piece(name: str, content: bytes) -> bytes:
    return struct.pack("!HI", len(name.encode()), len(content)) + name.encode() + content


def test_pieces_in_chunks_of_any_size_are_written_beside_their_sources(site: Path, site_fd: int) -> None:
    stream = b"".join(
        piece(name, compiled(site / source))
        for name, source in (
            (f"package/__init__.{TAG}.pyc", "package/__init__.py"),
            (f"package/below/module.{TAG}.pyc", "package/below/module.py"),
            (f"single.{TAG}.pyc", "single.py"),
        )
    )
    writer = BytecodeWriter(site_fd, TAG)
    for at in range(0, len(stream), 7):
        writer.take(stream[at : at + 7])
    assert writer.end().files == 3
    written = site / f"package/below/__pycache__/module.{TAG}.pyc"
    assert written.read_bytes() == compiled(site / "package/below/module.py")
    assert written.stat().st_mode & 0o7777 == 0o644 and written.parent.stat().st_mode & 0o7777 == 0o755
    assert (site / f"__pycache__/single.{TAG}.pyc").exists()


def test_what_python_itself_compiles_is_taken(site: Path, site_fd: int, tmp_path: Path) -> None:
    made = tmp_path / "made.pyc"
    py_compile.compile(str(site / "single.py"), str(made), doraise=True)
    writer = BytecodeWriter(site_fd, TAG)
    writer.take(piece(f"single.{TAG}.pyc", made.read_bytes()))
    assert writer.end().files == 1


@pytest.mark.parametrize(
    "name",
    [
        f"../outside.{TAG}.pyc",
        f"/single.{TAG}.pyc",
        f"package/../single.{TAG}.pyc",
        f"package//__init__.{TAG}.pyc",
        f"./single.{TAG}.pyc",
        "single.cpython-39.pyc",
        f"single.{TAG}.opt-1.pyc",
        "single.py",
        "single.pyc",
        f"single\n.{TAG}.pyc",
        f".{TAG}.pyc",
        "a/" * 70 + f"x.{TAG}.pyc",
        f"single.{TAG}.pyc/",
    ],
)
def test_a_name_that_leads_elsewhere_is_refused(site: Path, site_fd: int, name: str) -> None:
    before = sorted(site.rglob("*"))
    with pytest.raises(BytecodeRefused, match="name"):
        BytecodeWriter(site_fd, TAG).take(piece(name, compiled(site / "single.py")))
    assert sorted(site.rglob("*")) == before


def test_bytecode_of_no_source_or_of_another_one_is_left_out(site: Path, site_fd: int) -> None:
    source = site / "single.py"
    writer = BytecodeWriter(site_fd, TAG)
    writer.take(piece(f"absent.{TAG}.pyc", compiled(source)))
    writer.take(piece(f"absent/module.{TAG}.pyc", compiled(source)))
    writer.take(piece("x" * 256 + f"/module.{TAG}.pyc", compiled(source)))  # no name of a file is so long
    writer.take(piece("x" * 300 + f".{TAG}.pyc", compiled(source)))
    writer.take(piece(f"single.{TAG}.pyc", compiled(source, size_more=1)))
    writer.take(piece(f"single.{TAG}.pyc", compiled(source, flags=1)))
    writer.take(piece(f"single.{TAG}.pyc", b"short"))
    assert (writer.written.files, writer.written.skipped) == (0, 7)
    writer.take(piece(f"single.{TAG}.pyc", compiled(source)))
    writer.take(piece(f"package/__init__.{TAG}.pyc", compiled(site / "package/__init__.py", magic=b"XX\r\n")))
    assert (writer.end().files, writer.written.skipped) == (1, 8)


def test_bytecode_whose_place_a_directory_has_is_left_out(site: Path, site_fd: int) -> None:
    """Packages choose their files, also those in `__pycache__`."""
    (site / f"__pycache__/single.{TAG}.pyc").mkdir(parents=True)
    writer = BytecodeWriter(site_fd, TAG)
    writer.take(piece(f"single.{TAG}.pyc", compiled(site / "single.py")))
    assert (writer.end().files, writer.written.skipped) == (0, 1)


def test_links_are_not_followed(site: Path, site_fd: int, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "module.py").write_text("x")
    (site / "linked").symlink_to(outside)
    (site / "package/__pycache__").symlink_to(outside)
    (site / "linked_source.py").symlink_to(outside / "module.py")
    writer = BytecodeWriter(site_fd, TAG)
    writer.take(piece(f"linked/module.{TAG}.pyc", compiled(outside / "module.py")))
    writer.take(piece(f"package/__init__.{TAG}.pyc", compiled(site / "package/__init__.py")))
    writer.take(piece(f"linked_source.{TAG}.pyc", compiled(outside / "module.py")))
    assert (writer.written.files, writer.written.skipped) == (0, 3)
    assert sorted(path.name for path in outside.iterdir()) == ["module.py"]


def test_a_file_that_the_cache_shares_is_replaced_and_not_written_to(site: Path, site_fd: int, tmp_path: Path) -> None:
    shared = tmp_path / "shared.pyc"
    shared.write_bytes(b"the cache's own")
    (site / "__pycache__").mkdir()
    (site / f"__pycache__/single.{TAG}.pyc").hardlink_to(shared)
    writer = BytecodeWriter(site_fd, TAG)
    writer.take(piece(f"single.{TAG}.pyc", compiled(site / "single.py")))
    assert writer.end().files == 1
    assert shared.read_bytes() == b"the cache's own"
    assert (site / f"__pycache__/single.{TAG}.pyc").stat().st_nlink == 1


def test_lengths_are_refused_before_anything_is_kept(site_fd: int) -> None:
    with pytest.raises(BytecodeRefused, match="length"):
        BytecodeWriter(site_fd, TAG).take(struct.pack("!HI", 10, MAX_PIECE_BYTES + 1))
    with pytest.raises(BytecodeRefused, match="length"):
        BytecodeWriter(site_fd, TAG).take(struct.pack("!HI", 60_000, 1))
    with pytest.raises(BytecodeRefused, match="length"):
        BytecodeWriter(site_fd, TAG).take(struct.pack("!HI", 0, 1))


def test_a_stream_that_stops_in_a_piece_is_refused(site: Path, site_fd: int) -> None:
    writer = BytecodeWriter(site_fd, TAG)
    writer.take(piece(f"single.{TAG}.pyc", compiled(site / "single.py"))[:-1])
    with pytest.raises(BytecodeRefused, match="middle"):
        writer.end()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=rounds(200, 60))
@given(st.lists(st.tuples(st.text(max_size=30), st.binary(max_size=30)), max_size=4), st.binary(max_size=20))
def test_no_stream_writes_outside(site: Path, site_fd: int, pieces: list[tuple[str, bytes]], tail: bytes) -> None:
    before = sorted(site.parent.iterdir())
    writer = BytecodeWriter(site_fd, TAG)
    try:
        for name, content in pieces:
            writer.take(piece(name.encode("utf-8", "replace").decode(), content))
        writer.take(tail)
    except BytecodeRefused:
        pass
    assert sorted(site.parent.iterdir()) == before
    assert not [path for path in site.rglob("*.pyc") if path.parent.name != "__pycache__"]
