"""The archive of a sandbox is unpacked into the directory that was named, and nowhere else."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_client import InvalidRequest, ProtocolError
from executor_client._core import archives, local
from executor_client._core.archives import directory_content, unpack
from executor_client._core.local import NewFile, check_name, content_of, path_below
from tests.support.rounds import rounds
from tests.support.tars import archive, edited, member, tree


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A directory beside one that nothing may be written to."""
    (tmp_path / "outside").mkdir()
    yield tmp_path / "target"
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_directory_is_packed_and_unpacked_the_same(tmp_path: Path, target: Path) -> None:
    source = tmp_path / "source"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b" / ("ä" * 100)).write_bytes(os.urandom(700_000))
    (source / "empty").touch()
    (source / "none").mkdir()
    (source / "run").touch(mode=0o700)
    content = directory_content(source)
    data = b"".join(content.pieces())
    assert len(data) == content.size_bytes and b"".join(content.pieces()) == data
    unpack(io.BytesIO(data), target)
    assert tree(target) == tree(source)
    assert [(target / name).stat().st_mode & 0o777 for name in ("run", "empty")] == [0o755, 0o644]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "an absolute name": (archive(member("/outside/x")), "does not stay"),
    "a name that climbs out": (archive(member("../outside/x")), "does not stay"),
    "a directory that climbs out": (archive(member("..", tarfile.DIRTYPE)), "does not stay"),
    "a symbolic link": (archive(member("l", tarfile.SYMTYPE, linkname="../outside")), "'l' is neither"),
    "a hard link": (archive(member("ok"), member("l", tarfile.LNKTYPE, linkname="ok")), "'l' is neither"),
    "a device": (archive(member("d", tarfile.BLKTYPE)), "'d' is neither"),
    "a FIFO": (archive(member("f", tarfile.FIFOTYPE)), "'f' is neither"),
    "a sparse file": (
        archive(member("s", pax_headers={"GNU.sparse.map": "0,1", "GNU.sparse.size": "99"})),
        "cannot be read",
    ),
    "control characters": (archive(member("a\x1b[2J")), "control characters"),
    "a newline": (archive(member("a\nb")), "control characters"),
    "a name that is not UTF-8": (archive(member("a\udcff"), format=tarfile.USTAR_FORMAT), "not UTF-8"),
    "another format": (archive(member("f"), format=tarfile.GNU_FORMAT), "another format"),
    "a file twice": (archive(member("f"), member("f")), "'f' is in the way"),
    "a file below a file": (archive(member("f"), member("f/x")), "'f/x' is in the way"),
    "a file over a directory": (archive(member("f/x"), member("f")), "'f' is in the way"),
    "a deep name": (archive(member("/".join("d" * 65))), "too deep"),
    "a file of 100 GB": (archive(member("f", pax_headers={"size": str(10**11)})), "breaks off"),
    "a huge header": (archive(member("f", pax_headers={"comment": "x" * 1_100_000})), "cannot be read"),
    "a chain of headers": (tarfile.TarInfo("x" * 101).tobuf(tarfile.GNU_FORMAT)[:1024] * 3000, "cannot be read"),
    "no end": (archive(member("f"))[:1024], "breaks off"),
    "no archive": (b"x" * 1024, "cannot be read"),
    "a damaged header": (archive(member("f"))[:1024] + b"x" * 1024, "damaged"),
    "nothing": (b"", "cannot be read"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_before_anything_is_written(target: Path, what: str) -> None:
    data, said = HOSTILE[what]
    with pytest.raises(ProtocolError, match=said):
        unpack(io.BytesIO(data), target)
    assert not target.exists()


def test_members_are_bounded_in_number(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "DIRECTORY_ENTRIES_MAX", 2)
    with pytest.raises(ProtocolError, match="more than 2"):
        unpack(io.BytesIO(archive(*(member(f"{n}") for n in range(3)))), target)


def test_nothing_is_written_through_a_local_link(tmp_path: Path, target: Path) -> None:
    target.mkdir()
    (target / "d").symlink_to("../outside")
    for each in (member("d/x"), member("d", tarfile.DIRTYPE)):
        with pytest.raises(NotADirectoryError, match="in the way"):
            unpack(io.BytesIO(archive(each)), target)
    (target / "f").symlink_to("../outside/f")
    unpack(io.BytesIO(archive(member("f", mode=0o6777))), target)
    assert not (target / "f").is_symlink()
    assert (target / "f").stat().st_mode & 0o7777 == 0o755
    link = tmp_path / "link"
    link.symlink_to(target)
    unpack(io.BytesIO(archive(member("g"))), link)  # the caller chose the link
    assert (target / "g").exists()


SEED = archive(member("d", tarfile.DIRTYPE), member("d/f"), member("d/" + "long" * 50))


@settings(max_examples=rounds(100, 30), deadline=None)
@given(st.one_of(st.binary(max_size=2000), st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)))))
def test_any_bytes_are_unpacked_or_refused(bytes_or_edits: bytes | list[tuple[int, int]]) -> None:
    """Random ones, and an archive with some of its bytes changed and its checksums put right."""
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "target"
        try:
            unpack(io.BytesIO(_edited(bytes_or_edits)), target)
        except ProtocolError:
            assert not target.exists()
        assert {path.name for path in target.parent.iterdir()} <= {"target"}


def _edited(bytes_or_edits: bytes | list[tuple[int, int]]) -> bytes:
    if isinstance(bytes_or_edits, bytes):
        return bytes_or_edits
    return edited(SEED, bytes_or_edits)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/a",
        "a/",
        "a//b",
        "./a",
        "a/../b",
        "a\0b",
        "a\x7f",
        "\ud800",
        "a\tb",
        "a\nb",
        "é\u202etxt",
        "\u2066",
        "x" * 1025,
        "ä" * 128,
    ],
)
def test_a_name_that_is_not_safe_has_no_place(target: Path, name: str) -> None:
    with pytest.raises(ProtocolError):
        check_name(name)
    with pytest.raises(ProtocolError):
        path_below(target, name)
    assert not target.exists()


def test_a_name_with_a_mark_that_reorders_nothing_is_taken() -> None:
    assert check_name("\u200e00000042-PHOTO.jpg") == ("\u200e00000042-PHOTO.jpg",)


def test_a_new_file_is_there_when_it_is_committed_and_leaves_nothing_when_not(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"old")
    with pytest.raises(KeyError), NewFile(tmp_path / "f") as file:
        file.write(b"new")
        raise KeyError
    assert tree(tmp_path) == {"f": b"old"}
    with NewFile(tmp_path / "f") as file:
        file.write(b"new")
        file.commit()
    assert tree(tmp_path) == {"f": b"new"}
    with pytest.raises(IsADirectoryError):
        NewFile(tmp_path)


def test_what_is_written_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "FILE_BYTES_MAX", 3)
    with pytest.raises(ProtocolError), NewFile(tmp_path / "f") as file:
        file.write(b"four")
    assert tree(tmp_path) == {}


def test_only_regular_files_and_directories_are_put(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InvalidRequest, match="not a regular file"):
        content_of(tmp_path / "fifo")
    with pytest.raises(InvalidRequest, match="fifo is neither"):
        directory_content(tmp_path)
    with pytest.raises(FileNotFoundError):
        content_of(tmp_path / "missing")
    with pytest.raises(NotADirectoryError):
        directory_content(tmp_path / "fifo")


def test_a_file_that_becomes_shorter_while_it_is_put_is_said(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"12345")
    for content in (content_of(path), directory_content(tmp_path)):
        path.write_bytes(b"123")
        with pytest.raises(InvalidRequest, match="shorter"):
            list(content.pieces())
        path.write_bytes(b"12345")
