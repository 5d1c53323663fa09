"""Files of a sandbox while agent code changes them: never procfs, never blocked, whole or not at all, all closed."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from executor_server.guest.files import management, paths, workspace
from executor_server.guest.files.paths import PathRefused, resolve
from executor_server.guest.files.transfers import BLOB_TIME_S, MAX_BLOB_BYTES, MAX_BLOBS, MAX_TRANSFERS, Transfers
from executor_server.guest.files.workspace import Download, Upload, list_files
from executor_server.guest.wire.frames import CHUNK_BYTES, FrameError, Kind
from executor_server.guest.wire.link import read_memfd
from executor_server.guest.wire.messages import (
    BlobBegin,
    BlobData,
    Done,
    FileData,
    FileEntry,
    FileGet,
    FileList,
    FilePut,
    ManageFile,
)
from executor_server.guest.wire.schema import Message
from tests.support.descriptors import none_left_open

SECRET = b"secret"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A workspace beside a directory that stays as it is."""
    root, outside = tmp_path / "workspace", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "file").write_bytes(SECRET)
    with none_left_open():
        yield root
    assert [path.name for path in outside.iterdir()] == ["file"]
    assert (outside / "file").read_bytes() == SECRET


def put(root: Path, path: str, data: bytes, **options: Any) -> FileEntry:
    upload = Upload(resolve(str(root), path, create=True), len(data), **options)
    try:
        upload.write(memoryview(data))
        return upload.finish()
    except PathRefused:
        upload.abandon()
        raise


def get(root: Path, path: str, max_bytes: int = 10**6, piece_bytes: int = 1000, **options: Any) -> bytes:
    with resolve(str(root), path) as place:
        download = Download(place, max_bytes, **options)
    try:
        return b"".join(iter(lambda: download.read(piece_bytes), b""))
    finally:
        download.close()


def listed(root: Path, path: str) -> tuple[list[FileEntry], bool]:
    with resolve(str(root), path) as place:
        return list_files(place, lambda _path, _why: None)


def manage(root: Path, action: str, path: str, **options: Any) -> Any:
    return management.manage(str(root), ManageFile(op=1, action=action, path=path, **options))


def test_a_file_goes_in_and_comes_out(root: Path) -> None:
    data = os.urandom(5000)
    assert put(root, "a/b/./c", data).path == "a/b/c"
    assert get(root, "a//b/c") == data
    assert put(root, "a/b/c", b"new").size == 3
    assert get(root, "a/b/c") == b"new"
    entries, truncated = listed(root, "")
    assert [(entry.path, entry.directory) for entry in entries] == [("a", True), ("a/b", True), ("a/b/c", False)]
    assert [entry.path for entry in listed(root, "a/b")[0]] == ["c"]
    assert not truncated


@pytest.mark.parametrize(
    "path",
    ["a\0b", "x" * 4097, "x" * 256, "ä" * 128, "/proc/self/comm", "/proc/1/../self/comm", "/dev/fd/0", "link/comm"],
)
def test_a_path_that_leads_nowhere_allowed_is_refused(root: Path, path: str) -> None:
    (root / "link").symlink_to("/proc/self")
    for use in (lambda: put(root, path, b""), lambda: get(root, path), lambda: listed(root, path)):
        with pytest.raises(PathRefused):
            use()
    for action in ("stat", "remove", "mkdir"):
        with pytest.raises(PathRefused):
            manage(root, action, path, follow=True, recursive=True)


def test_links_and_dots_lead_where_the_kernel_follows_them(root: Path) -> None:
    (root / "dir").mkdir()
    (root / "dir/up").symlink_to("../..")
    (root / "absolute").symlink_to(root / "dir")
    (root / "chain").symlink_to("absolute/up/outside/file")
    (root / "loop").symlink_to("loop")
    assert get(root, "chain") == get(root, "dir/up/outside/file") == get(root, str(root / "chain")) == SECRET
    assert manage(root, "realpath", "absolute/../dir/no/./file").path == str(root / "dir/no/file")
    assert manage(root, "realpath", "chain").path == str(root.parent / "outside/file")
    assert manage(root, "stat", "chain", follow=True).size == len(SECRET)
    assert manage(root, "stat", "absolute", follow=False).target == str(root / "dir")
    with pytest.raises(PathRefused, match="Too many levels"):
        get(root, "loop")


def test_a_path_of_many_parts_and_links_is_bounded(root: Path) -> None:
    for number in range(40):
        (root / f"l{number}").symlink_to("./" * 1000 + f"../{root.name}/" * 150 + f"l{number + 1}")
    with pytest.raises(PathRefused, match="Too many levels"):
        get(root, "l0")


@pytest.mark.parametrize("path", ["", ".", "./"])
def test_the_workspace_itself_is_no_file(root: Path, path: str) -> None:
    for use in (lambda: put(root, path, b""), lambda: get(root, path), lambda: manage(root, "remove", path)):
        with pytest.raises(PathRefused):
            use()


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("what", ODD_FILES)
def test_only_regular_files_are_read_and_written(root: Path, what: str) -> None:
    ODD_FILES[what](root / "odd")
    for use in (
        lambda: get(root, "odd"),
        lambda: put(root, "odd", b"x"),
        lambda: put(root, "odd", b"x", append=True),
    ):
        with pytest.raises(PathRefused, match=f"'odd' is not a regular file, but {what}"):
            use()
    for path in ("odd", "odd/file"):
        with pytest.raises(PathRefused) as refused:
            listed(root, path)
        assert refused.value.reason == "file_not_directory"


def test_a_device_is_refused_without_being_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening one can have effects of its own. /dev takes the workspace's part: to make a device takes privileges."""
    opened: list[int] = []

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def open(path: str, flags: int, *args: Any, **kwargs: Any) -> int:
            opened.append(flags)
            return os.open(path, flags, *args, **kwargs)

    monkeypatch.setattr(workspace, "os", Watching())
    monkeypatch.setattr(paths, "os", Watching())
    with none_left_open(), pytest.raises(PathRefused, match="'zero' is not a regular file"):
        get(Path("/dev"), "zero")
    assert all(flags & (os.O_PATH | os.O_DIRECTORY) for flags in opened)


def test_an_upload_goes_through_links_and_keeps_the_mode(root: Path) -> None:
    put(root, "file", b"old", mode=0o751)
    (root / "link").symlink_to("file")
    (root / "new").symlink_to("made/here")
    assert put(root, "link", b"mine").mode == 0o751
    put(root, "new", b"through a dangling link")
    assert (root / "link").is_symlink() and (root / "new").is_symlink()
    assert (get(root, "file"), get(root, "made/here")) == (b"mine", b"through a dangling link")


def test_a_file_is_appended_to_and_read_in_parts(root: Path) -> None:
    assert put(root, "log", b"12", append=True).size == 2
    assert put(root, "log", b"345", append=True, mode=0o600).mode == 0o600
    parts = [(0, None), (1, 2), (4, 9), (5, None), (2**62, 1)]
    assert [get(root, "log", offset=at, length=length) for at, length in parts] == [b"12345", b"23", b"5", b"", b""]
    assert get(root, "log", max_bytes=2, length=2) == b"12"


def test_what_is_missing_is_told_from_what_is_refused(root: Path) -> None:
    for use in (lambda: get(root, "no"), lambda: get(root, "no/file"), lambda: listed(root, "no")):
        with pytest.raises(PathRefused) as refused:
            use()
        assert refused.value.reason == "file_not_found"


def test_an_upload_is_whole_or_not_there(root: Path) -> None:
    put(root, "file", b"old")
    upload = Upload(resolve(str(root), "file"), 3)
    upload.write(memoryview(b"ne"))
    assert get(root, "file") == b"old"
    assert [entry.path for entry in listed(root, "")[0]] == ["file"]
    with pytest.raises(PathRefused):
        upload.write(memoryview(b"www"))
    upload.abandon()
    assert [path.name for path in root.iterdir()] == ["file"]
    assert get(root, "file") == b"old"


def test_a_download_gives_what_it_announced_or_fails_when_the_file_shrinks(root: Path) -> None:
    put(root, "file", b"12345")
    with resolve(str(root), "file") as place:
        grown, shrunk = Download(place, 10), Download(place, 8)
    with (root / "file").open("ab") as file:
        file.write(b"678")
    assert [grown.read(4), grown.read(4), grown.read(4)] == [b"1234", b"5", b""]
    os.truncate(root / "file", 0)
    with pytest.raises(PathRefused, match="shrank"):
        shrunk.read(4)
    grown.close()
    shrunk.close()


def test_a_file_over_the_limit_is_refused(root: Path) -> None:
    put(root, "file", b"12345")
    with pytest.raises(PathRefused, match="at most 4") as refused:
        get(root, "file", max_bytes=4)
    assert refused.value.reason == "too_large"


def test_a_listing_is_bounded_and_skips_names_that_no_client_could_ask_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "d").mkdir()
    for number in range(20):
        (root / "d" / f"f{number:02}").touch()
    os.close(os.open(os.fsencode(root) + b"/\xff", os.O_CREAT, 0o600))
    entries, truncated = listed(root, "")
    assert (len(entries), truncated) == (21, False)
    monkeypatch.setattr(workspace, "MAX_LISTED", 5)
    entries, truncated = listed(root, "")
    assert (len(entries), truncated) == (5, True)


class Swapping:
    """The module os, but before its `at`th call something happens."""

    def __init__(self, at: int, swap: Callable[[], object]) -> None:
        self.calls = 0
        self._at = at
        self._swap = swap

    def __getattr__(self, name: str) -> Any:
        value = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self._at:
                self._swap()
            return value(*args, **kwargs)

        return call if callable(value) else value


USES: dict[str, Callable[[Path], Any]] = {
    "get": lambda root: get(root, "a/comm"),
    "put": lambda root: put(root, "a/comm", b"mine"),
    "append": lambda root: put(root, "a/comm", b"", append=True),
    "list": lambda root: listed(root, "a"),
    "remove": lambda root: manage(root, "remove", "a/comm"),
    "move": lambda root: manage(root, "move", "a/comm", target="a/moved"),
}


@pytest.mark.parametrize("what", ["directory", "file"])
@pytest.mark.parametrize("use", USES)
def test_no_swap_for_a_link_at_any_moment_leads_into_procfs(
    root: Path, use: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each single call that is made to the system, what is used becomes a link to this process in /proc."""
    before = Path("/proc/self/comm").read_bytes()
    moments = 0
    while True:
        moments += 1
        mine = root / f"{moments}"
        (mine / "a").mkdir(parents=True)
        (mine / "a/comm").write_bytes(b"mine")
        victim = mine / ("a" if what == "directory" else "a/comm")

        def swap(victim: Path = victim) -> None:
            if victim.exists():
                victim.rename(root / "swapped")
                victim.symlink_to("/proc/self" if what == "directory" else "/proc/self/comm")

        system = Swapping(moments, swap)
        for module in (paths, workspace, management):
            monkeypatch.setattr(module, "os", system)
        with suppress(PathRefused):
            result = USES[use](mine)
            assert use != "get" or result == b"mine"
            assert use != "list" or [entry.path for entry in result[0]] == ["comm"]
        for module in (paths, workspace, management):
            monkeypatch.setattr(module, "os", os)
        assert Path("/proc/self/comm").read_bytes() == before
        if system.calls < moments:
            return
        if (root / "swapped").exists():
            (root / "swapped").rename(root / f"swapped-{moments}")


def test_a_deep_and_wide_tree_is_removed_in_steps_with_few_descriptors(root: Path) -> None:
    (root / "tree").mkdir()
    (root / "tree/link").symlink_to("../../outside")
    directory = os.open(root / "tree", os.O_RDONLY)
    for _ in range(1100):
        os.mkdir("d", dir_fd=directory)
        inner = os.open("d", os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        directory = inner
    os.close(directory)
    for number in range(1000):
        (root / "tree" / f"f{number}").touch()
    removal = manage(root, "remove", "tree", recursive=True)
    steps = 1
    while not removal.step():
        steps += 1
    removal.close()
    assert steps > 10 and not (root / "tree").exists()


def test_a_directory_that_is_moved_while_it_is_removed_ends_the_removal_there(root: Path) -> None:
    (root / "tree/a/b").mkdir(parents=True)
    for number in range(300):
        (root / f"tree/a/b/{number}").touch()
    (root / "kept").mkdir()
    (root / "kept/file").touch()
    removal = manage(root, "remove", "tree", recursive=True)
    assert not removal.step()
    (root / "tree/a/b").rename(root / "kept/b")
    with pytest.raises(PathRefused, match="was moved"):
        removal.step()
    removal.close()
    assert (root / "kept/file").exists()


def test_a_real_path_that_is_too_long_to_be_sent_is_refused(root: Path) -> None:
    """Links make it longer than any path that a client can ask for."""
    directory, above = os.open(root, os.O_RDONLY), "."
    for number in range(20):
        name, link = f"{number}".ljust(250, "x"), f"l{number}"
        os.mkdir(name, dir_fd=directory)
        inner = os.open(name, os.O_RDONLY, dir_fd=directory)
        os.close(directory)
        (root / link).symlink_to(f"{above}/{name}")
        directory, above = inner, link
    os.close(directory)
    assert len(manage(root, "realpath", "l9").path) > 2500
    with pytest.raises(PathRefused, match="more than 4096 bytes"):
        manage(root, "realpath", "l19")


# -- transfers


class Answers:
    """Takes what would go to the daemon."""

    def __init__(self) -> None:
        self.full = False
        self.connected = True
        self.sent: list[tuple[int, dict[str, Any], bytes]] = []

    def send(self, message: Message, body: bytes = b"") -> None:
        self.sent.append((message.kind, message.head(), body))

    def done(self, op: int, body: bytes = b"", **more: Any) -> None:
        self.send(Done(op=op, ok=True, **more), body)

    def fail(self, op: int, reason: str, message: str) -> None:
        self.send(Done(op=op, ok=False, reason=reason, message=message))

    def answer(self, op: int) -> str:
        """Returns the answer to a request: "ok", the reason of a refusal, or nothing yet."""
        done = [head for kind, head, _ in self.sent if kind == Kind.DONE and head["op"] == op]
        assert len(done) <= 1, "answered twice"
        return "" if not done else "ok" if done[0]["ok"] else done[0]["reason"]


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def transfers(root: Path, answers: Answers) -> Iterator[Transfers]:
    transfers = Transfers(answers, str(root), lambda *_: None)  # type: ignore[arg-type]
    yield transfers
    transfers.close_all()


def stage(transfers: Transfers, blob_id: str, data: bytes, size: int | None = None, op: int = 1) -> None:
    transfers.begin_blob(BlobBegin(op=op, blob=blob_id, size=len(data) if size is None else size))
    transfers.add_to_blob(BlobData(blob=blob_id), memoryview(data))


def test_a_blob_is_staged_in_pieces_and_taken_once_sealed(transfers: Transfers) -> None:
    stage(transfers, "b", b"12", size=4)
    transfers.add_to_blob(BlobData(blob="b"), memoryview(b"34"))
    fd = transfers.take_blob("b")
    assert fd is not None
    with pytest.raises(PermissionError):
        os.write(fd, b"x")
    assert read_memfd(fd, 4) == b"1234"
    assert transfers.take_blob("b") is None


def test_a_blob_that_is_not_whole_is_not_given_and_not_kept(transfers: Transfers) -> None:
    stage(transfers, "b", b"12", size=4)
    assert transfers.take_blob("b") is None
    stage(transfers, "c", b"12")
    transfers.drop_blob("c")
    transfers.drop_blob("c")
    assert transfers.take_blob("c") is None
    with pytest.raises(FrameError):
        stage(transfers, "d", b"123", size=2)


def test_blobs_are_bounded_in_number_and_size(transfers: Transfers, answers: Answers) -> None:
    stage(transfers, "large", b"", size=MAX_BLOB_BYTES)
    stage(transfers, "more", b"", size=1, op=2)
    assert answers.answer(2) == "too_large"
    for number in range(MAX_BLOBS):
        stage(transfers, f"b{number}", b"", op=10 + number)
    assert answers.answer(10 + MAX_BLOBS - 2) == "ok"
    assert answers.answer(10 + MAX_BLOBS - 1) == "too_large"


def test_a_blob_that_nobody_names_expires_unless_a_message_waits_that_does(transfers: Transfers) -> None:
    for blob_id in ("forgotten", "claimed"):
        stage(transfers, blob_id, b"x")
    transfers.claim_blob("claimed")
    transfers.expire_blobs(time.monotonic())
    transfers.expire_blobs(float("1e18"))
    assert transfers.take_blob("forgotten") is None
    fd = transfers.take_blob("claimed")
    assert fd is not None
    os.close(fd)


def test_a_blob_outlives_any_time_without_a_daemon(transfers: Transfers, answers: Answers) -> None:
    stage(transfers, "b", b"x")
    now = time.monotonic()
    answers.connected = False
    transfers.expire_blobs(now)
    answers.connected = True
    transfers.expire_blobs(now + 10_000)
    transfers.expire_blobs(now + 10_000 + BLOB_TIME_S / 2)
    assert "b" in transfers._blobs
    transfers.expire_blobs(now + 10_000 + BLOB_TIME_S)
    assert transfers.take_blob("b") is None


def test_a_new_daemon_finds_no_files_on_their_way_and_every_blob(
    transfers: Transfers, answers: Answers, root: Path
) -> None:
    (root / "f").write_bytes(b"old")
    stage(transfers, "b", b"x", op=9)
    transfers.begin_file(FilePut(op=1, path="g", size=9))
    transfers.begin_file(FileGet(op=2, path="f", max_bytes=9))
    transfers.on_new_daemon()
    transfers.pump()
    transfers.add_to_file(FileData(op=1), memoryview(b"x"))
    assert (answers.answer(1), answers.answer(2)) == ("", "")
    assert [path.name for path in root.iterdir()] == ["f"]
    fd = transfers.take_blob("b")
    assert fd is not None
    os.close(fd)


def test_a_file_is_put_and_got_by_frames(transfers: Transfers, answers: Answers) -> None:
    data = os.urandom(CHUNK_BYTES + 10)
    transfers.begin_file(FilePut(op=1, path="f", size=len(data)))
    for start in range(0, len(data), CHUNK_BYTES):
        assert answers.answer(1) == ""
        transfers.add_to_file(FileData(op=1), memoryview(data[start : start + CHUNK_BYTES]))
    transfers.begin_file(FilePut(op=2, path="empty", size=0))
    assert (answers.answer(1), answers.answer(2)) == ("ok", "ok")
    transfers.begin_file(FileGet(op=3, path="f", max_bytes=10**6))
    answers.full = True
    transfers.pump()
    assert answers.answer(3) == "" and not transfers.busy, "nothing goes out while the daemon takes nothing"
    answers.full = False
    while transfers.busy:
        transfers.pump()
    chunks = [body for kind, _, body in answers.sent if kind == Kind.FILE_CHUNK]
    assert b"".join(chunks) == data
    assert answers.answer(3) == "ok"


def test_each_failed_transfer_is_answered_once_and_closed(transfers: Transfers, answers: Answers, root: Path) -> None:
    os.mkfifo(root / "fifo")
    (root / "dir").mkdir()
    transfers.begin_file(FileGet(op=1, path="fifo", max_bytes=9))
    transfers.begin_file(FileGet(op=2, path="no", max_bytes=9))
    transfers.begin_file(FilePut(op=3, path="dir", size=1))
    transfers.begin_file(FilePut(op=4, path="f", size=1))
    transfers.begin_file(FilePut(op=5, path="g", size=1))
    transfers.begin_file(FileList(op=6, path="/proc/self"))
    for op in (3, 4, 4, 4, 5):
        piece = FileData(op=op, abandon=True if op == 5 else None)
        transfers.add_to_file(piece, memoryview(b"x" if op == 3 else b"xx"))
    assert [answers.answer(op) for op in range(1, 7)] == [
        "path_refused",
        "file_not_found",
        "file_is_directory",
        "path_refused",
        "",
        "path_refused",
    ]
    assert sorted(path.name for path in root.iterdir()) == ["dir", "fifo"]


def test_transfers_are_bounded_in_number(transfers: Transfers, answers: Answers) -> None:
    for op in range(1, MAX_TRANSFERS + 2):
        transfers.begin_file(FilePut(op=op, path=f"f{op}", size=1))
    assert answers.answer(MAX_TRANSFERS) == ""
    assert answers.answer(MAX_TRANSFERS + 1) == "queue_full"


def test_a_listing_of_names_that_grow_on_the_wire_is_cut_where_it_is_full(
    transfers: Transfers, answers: Answers, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each character can take twelve bytes: all of them at once took ten times what was sent."""
    monkeypatch.setattr("executor_server.guest.files.transfers._LISTING_BYTES", 4000)
    names = sorted(f"{number:02}" + "\N{PILE OF POO}" * 50 for number in range(20))
    for name in names:
        (root / name).touch()
    transfers.begin_file(FileList(op=1, path=""))
    ((_, head, body),) = answers.sent
    listed = [entry["path"] for entry in json.loads(body)]
    assert head["truncated"] is True
    assert listed == names[: len(listed)]
    assert 3000 < len(body) <= 4002
