"""Directories as tar: what tar(1) and Python make is read, what they read is made, and nothing hostile gets through."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.guest.files import archives, workspace
from executor_server.guest.files.archives import ArchiveDownload, ArchiveUpload
from executor_server.guest.files.paths import PathRefused, resolve
from executor_server.guest.wire.frames import CHUNK_BYTES
from tests.support.descriptors import none_left_open
from tests.support.rounds import rounds
from tests.support.tars import archive, edited, member, tree

LONG = "/".join(["a long name of a directory"] * 6) + "/fïle"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A workspace beside a directory that it must never reach."""
    root, outside = tmp_path / "workspace", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    with none_left_open():
        yield root
    assert list(outside.iterdir()) == []


def unpack(root: Path, data: bytes, path: str = "", piece_bytes: int = 1000, announced: int | None = None) -> Any:
    size = len(data) if announced is None else announced
    upload = ArchiveUpload(resolve(str(root), path, create=True), size)
    try:
        for start in range(0, len(data), piece_bytes):
            upload.write(memoryview(data)[start : start + piece_bytes])
        return upload.finish()
    except PathRefused:
        upload.abandon()
        raise


def pack(root: Path, path: str = "", max_bytes: int = 10**7, piece_bytes: int = CHUNK_BYTES, *left_out: str) -> bytes:
    download = ArchiveDownload(resolve(str(root), path), max_bytes, frozenset(left_out))
    try:
        pieces = list(iter(lambda: download.read(piece_bytes), b""))
        assert all(len(piece) <= piece_bytes for piece in pieces)
        return b"".join(pieces)
    finally:
        download.close()


def make_tree(root: Path) -> dict[str, bytes | None]:
    (root / LONG).parent.mkdir(parents=True)
    (root / LONG).write_bytes(b"deep")
    (root / "empty").touch()
    (root / "none").mkdir()
    (root / "large").write_bytes(os.urandom(3 * CHUNK_BYTES + 17))
    (root / "run").write_text("#!/bin/sh\n")
    (root / "run").chmod(0o750)
    return tree(root)


@pytest.mark.parametrize("piece_bytes", [100, 512, 10_000, CHUNK_BYTES])
def test_a_directory_goes_out_and_comes_in_the_same(root: Path, piece_bytes: int) -> None:
    (root / "from").mkdir()
    made = make_tree(root / "from")
    data = pack(root, "from", piece_bytes=piece_bytes)
    info = unpack(root, data, "to/there", piece_bytes)
    assert (info.path, info.directory) == ("to/there", True)
    assert tree(root / "to/there") == made
    assert (root / "to/there/run").stat().st_mode & 0o777 == 0o755
    assert (root / "to/there/empty").stat().st_mode & 0o777 == 0o644


def test_what_goes_out_is_read_by_tar_and_by_python(root: Path, tmp_path: Path) -> None:
    made = make_tree(root)
    os.utime(root / "empty", (1.5e9, 1.5e9))
    data = pack(root)
    for_tar, for_python = tmp_path / "by-tar", tmp_path / "by-python"
    for_tar.mkdir()
    subprocess.run(["tar", "-x", "-C", for_tar], input=data, check=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r|") as tar:
        tar.extractall(for_python, filter="data")
    assert tree(for_tar) == tree(for_python) == made
    assert (for_tar / "empty").stat().st_mtime == 1.5e9


@pytest.mark.parametrize("format", ["ustar", "pax", "gnu", "v7", "posix"])
def test_what_tar_makes_is_unpacked(root: Path, tmp_path: Path, format: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    made = make_tree(source)
    if format == "v7":  # its header has no room for long names
        subprocess.run(["rm", "-r", source / LONG.split("/")[0]], check=True)
        made = tree(source)
    data = subprocess.run(
        ["tar", "-c", f"--format={format}", "-C", source, "."], check=True, capture_output=True
    ).stdout
    unpack(root, data)
    assert tree(root) == made


def test_only_regular_files_and_directories_go_out(root: Path) -> None:
    (root / "file").write_bytes(b"mine")
    os.link(root / "file", root / "twin")
    (root / "link").symlink_to("../outside")
    (root / "d").mkdir()
    (root / "d/loop").symlink_to("..")
    os.mkfifo(root / "fifo")
    os.close(os.open(os.fsencode(root) + b"/\xff", os.O_CREAT, 0o600))
    with tarfile.open(fileobj=io.BytesIO(pack(root))) as tar:
        assert [(each.name, each.type) for each in tar] == [
            ("d", tarfile.DIRTYPE),
            ("file", tarfile.REGTYPE),
            ("twin", tarfile.REGTYPE),
        ]


def test_a_directory_that_is_too_large_is_refused_before_anything_is_sent(root: Path) -> None:
    (root / "sparse").touch()
    os.truncate(root / "sparse", 100 * 2**30)
    with pytest.raises(PathRefused, match="'sparse'") as refused:
        ArchiveDownload(resolve(str(root), ""), 2**30)
    assert refused.value.reason == "too_large"


def test_a_directory_of_too_many_entries_or_too_deep_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "/".join("d" * 32)).mkdir(parents=True)
    with pytest.raises(PathRefused, match="too deep"):
        pack(root)
    monkeypatch.setattr(workspace, "MAX_LISTED", 31)
    with pytest.raises(PathRefused, match="entries"):
        pack(root)


@pytest.mark.parametrize(
    ("path", "reason"),
    [("file", "file_not_directory"), ("fifo", "file_not_directory"), ("/proc/self/fd", "path_refused")],
)
def test_only_a_directory_goes_out_and_in(root: Path, path: str, reason: str) -> None:
    (root / "file").touch()
    os.mkfifo(root / "fifo")
    for use in (lambda: pack(root, path), lambda: unpack(root, archive(member("x")), path)):
        with pytest.raises(PathRefused) as refused:
            use()
        assert refused.value.reason == reason


def test_names_and_paths_are_left_out_with_what_is_below_them(root: Path) -> None:
    for path in (".git/config", "a/.git/config", "a/kept", "a/gone", "b/gone/x", "gone"):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(b"x")
    with tarfile.open(fileobj=io.BytesIO(pack(root, "", 10**6, CHUNK_BYTES, ".git", "a/gone", "b"))) as tar:
        assert tar.getnames() == ["a", "a/kept", "gone"]


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more" * 1000)


def swap_for_a_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


@pytest.mark.parametrize("change", [grow, Path.unlink, swap_for_a_link])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_file_that_changes_meanwhile_leaves_the_archive_whole(
    root: Path, change: Callable[[Path], object], when: int
) -> None:
    for name in "abc":
        (root / name).write_bytes(name.encode() * 600)
    download = ArchiveDownload(resolve(str(root), ""), 10**6)
    pieces = [download.read(600) for _ in range(when * 2)]
    change(root / "b")
    pieces += iter(lambda: download.read(600), b"")
    download.close()
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        content = {each.name: tar.extractfile(each).read() for each in tar}  # type: ignore[union-attr]
    assert content.pop("b", b"b").strip(b"b").replace(b"more", b"") == b""
    assert content == {"a": b"a" * 600, "c": b"c" * 600}


def test_a_file_that_shrinks_while_it_is_read_ends_the_archive_with_its_name(root: Path) -> None:
    (root / "file").write_bytes(bytes(5000))
    download = ArchiveDownload(resolve(str(root), ""), 10**6)
    assert len(download.read(1000)) == 1000
    os.truncate(root / "file", 1200)
    with pytest.raises(PathRefused, match="'file' shrank"):
        while download.read(1000):
            pass
    download.close()


def test_a_directory_that_grows_meanwhile_goes_no_further_than_its_limit(root: Path) -> None:
    for name in "ab":
        (root / name).touch()
    download = ArchiveDownload(resolve(str(root), ""), 4096)
    os.truncate(root / "b", 10**12)
    with pytest.raises(PathRefused) as refused:
        while download.read(1000):
            pass
    assert refused.value.reason == "too_large"
    download.close()


HOSTILE: dict[str, tuple[bytes, str]] = {
    "an absolute name": (archive(member("/etc/x")), "member '/etc/x'"),
    "a name that climbs out": (archive(member("a/../../outside/x")), "member 'a/../../outside/x'"),
    "a directory that climbs out": (archive(member("..", tarfile.DIRTYPE)), "member '../'"),
    "no name": (archive(member(".")), "member '.'"),
    "a symbolic link": (archive(member("s", tarfile.SYMTYPE, linkname="/etc")), "'s' is a symbolic link"),
    "a long link": (
        archive(member("s", tarfile.SYMTYPE, linkname="/etc" * 50), format=tarfile.GNU_FORMAT),
        "is a link",
    ),
    "a hard link": (archive(member("h", tarfile.LNKTYPE, linkname="x")), "'h' is a hard link"),
    "a device": (archive(member("d", tarfile.CHRTYPE, devmajor=1, devminor=5)), "'d' is a device"),
    "a FIFO": (archive(member("f", tarfile.FIFOTYPE)), "'f' is a FIFO"),
    "an unknown kind": (archive(member("u", b"Z")), "'u' is of a kind"),
    "a file that becomes a directory": (archive(member("f"), member("f/x")), "member 'f/x'"),
    "a directory that becomes a file": (archive(member("f", tarfile.DIRTYPE), member("f")), "member 'f'"),
    "a deep name": (archive(member("/".join("d" * 33))), "at most 32 parts"),
    "a long part": (archive(member("x" * 256)), "255 bytes"),
    "a name that is not UTF-8": (archive(member("a\udcff"), format=tarfile.GNU_FORMAT), "not UTF-8"),
    "a NUL in a name": (archive(member("a", pax_headers={"path": "a\0b"})), "NUL"),
    "a sparse file": (
        archive(member("s", pax_headers={"GNU.sparse.major": "1", "GNU.sparse.minor": "0"})),
        "'s' is a sparse file",
    ),
    "an absurd size": (archive(member("a", pax_headers={"size": str(10**17)})), "'a' is larger than the archive"),
    "a size that is none": (archive(member("a", pax_headers={"size": "-1"})), "damaged pax"),
    "a size of too many digits": (archive(member("a", pax_headers={"size": "9" * 5000})), "damaged pax"),
    "a huge extension": (archive(member("a", pax_headers={"comment": "x" * 70_000})), "headers before a member"),
    "a breaking end": (archive(member("a"))[:700], "breaks off"),
    "a missing end": (archive(member("a"))[:1024], "breaks off"),
    "an end and more": (archive(member("a")) + archive(member("b")), "goes on after its end"),
    "nothing": (b"", "breaks off"),
    "no archive": (b"PK\3\4" + bytes(1000), "not a tar archive"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_with_the_name_of_its_member(root: Path, what: str) -> None:
    data, expected = HOSTILE[what]
    with pytest.raises(PathRefused) as refused:
        unpack(root, data)
    assert expected in str(refused.value)
    assert not any(name.name.startswith(workspace.PART_PREFIX) for name in root.iterdir())


def test_a_global_header_may_comment_but_not_rename(root: Path) -> None:
    for headers, allowed in (({"comment": "x"}, True), ({"path": "y"}, False)):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT, pax_headers=headers) as tar:
            tar.addfile(member("x", size=1), io.BytesIO(b"x"))
        if allowed:
            unpack(root, raw.getvalue())
        else:
            with pytest.raises(PathRefused, match="global header"):
                unpack(root, raw.getvalue())


def test_members_are_bounded_in_number(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 2)
    with pytest.raises(PathRefused, match="more than 2 members"):
        unpack(root, archive(*(member(f"{n}") for n in range(3))))


def test_nothing_is_unpacked_through_a_link(root: Path) -> None:
    (root / "d").symlink_to("../outside")
    with pytest.raises(PathRefused, match="member 'd/x'"):
        unpack(root, archive(member("d/x")))
    with pytest.raises(PathRefused, match="member 'd/'"):
        unpack(root, archive(member("d", tarfile.DIRTYPE)))
    (root / "d").unlink()
    (root / "f").symlink_to("../outside/f")
    unpack(root, archive(member("f")))  # takes the link's place
    assert not (root / "f").is_symlink()


def test_what_came_before_a_refused_member_stays_and_the_rest_does_not(root: Path) -> None:
    (root / "old").write_bytes(b"old")
    with pytest.raises(PathRefused):
        unpack(root, archive(member("first"), member("f", tarfile.FIFOTYPE), member("last")))
    assert tree(root) == {"first": b"x", "old": b"old"}


def test_a_full_disk_is_said_with_the_member(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def write(fd: int, data: memoryview) -> int:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(workspace, "os", Full())
    with pytest.raises(PathRefused, match=r"member 'a'.*No space left") as refused:
        unpack(root, archive(member("a")))
    assert refused.value.reason == "too_large"


SEED = archive(member("d", tarfile.DIRTYPE), member("d/f"), member(LONG), content=b"content")


@settings(max_examples=rounds(150, 50), deadline=None)
@given(
    st.one_of(
        st.binary(max_size=3000),
        st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=8),
    ),
    st.integers(1, 4000),
)
def test_any_bytes_are_unpacked_or_refused(bytes_or_edits: bytes | list[tuple[int, int]], piece_bytes: int) -> None:
    """Random ones, and an archive with some of its bytes changed and its checksums put right."""
    with tempfile.TemporaryDirectory() as directory, none_left_open():
        root = Path(directory) / "workspace"
        root.mkdir()
        with suppress(PathRefused):
            unpack(root, _edited(bytes_or_edits), piece_bytes=piece_bytes)
        assert [path.name for path in Path(directory).iterdir()] == ["workspace"]
        assert not any(path.is_symlink() or path.name.startswith(".executor-part") for path in root.rglob("*"))


def _edited(bytes_or_edits: bytes | list[tuple[int, int]]) -> bytes:
    if isinstance(bytes_or_edits, bytes):
        return bytes_or_edits
    return edited(SEED, bytes_or_edits)


def test_what_is_left_out_is_named_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("a")
    os.mkfifo(tmp_path / "pipe")
    download = ArchiveDownload(resolve(str(tmp_path), ""), 1024 * 1024)
    while download.read(4096):
        pass
    assert (download.files, download.file_bytes) == (1, 5)
    assert {each["name"]: each["reason"] for each in download.omitted} == {"link": "a symbolic link", "pipe": "a FIFO"}
