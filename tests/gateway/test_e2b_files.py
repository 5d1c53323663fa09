"""What E2B's SDK expects of files, with the real SDK, and uploads that no SDK sends."""

from __future__ import annotations

import contextlib
import gzip
import io
import socket
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import (
    AuthenticationException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotEnoughSpaceException,
    Sandbox,
    SandboxException,
)
from e2b.sandbox.filesystem.filesystem import WriteEntry

from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.gateway import Gateway

MIB = 1 << 20
DISK_BYTES = 48 * MIB
POLICY = f"default = 'default'\n[profiles.default.limits.default]\ndisk_bytes = {DISK_BYTES}\n"
EACH_FORM = pytest.mark.parametrize("form", [{}, {"use_octet_stream": True}, {"gzip": True}], ids=str)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    require("local")
    with daemon_of("", "--backend", "local", policy=POLICY) as running:
        yield running


@pytest.fixture(scope="module")
def sandbox(e2b: Gateway) -> Iterator[Sandbox]:
    with Sandbox.create() as sandbox:
        yield sandbox


@pytest.fixture
def http(gateway: Gateway, sandbox: Sandbox) -> Iterator[httpx.Client]:
    """/files of the sandbox, with its access token."""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": str(sandbox._envd_access_token)}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=30) as client:
        yield client


# Contents


@EACH_FORM
@pytest.mark.parametrize("data", ["text ü🦀\n", b"\x00\xff bytes", io.BytesIO(b"file" * 100_000), io.StringIO("ü"), ""])
def test_what_is_written_is_read_again(sandbox: Sandbox, form: dict[str, bool], data: str | bytes | io.IOBase) -> None:
    expected = data if isinstance(data, str | bytes) else data.getvalue()  # type: ignore[attr-defined]
    expected = expected.encode() if isinstance(expected, str) else expected
    if isinstance(data, io.IOBase):
        data.seek(0)
    info = sandbox.files.write("below/of new/written", data, **form)  # type: ignore[arg-type]
    assert (info.path, info.name, info.type) == ("/home/user/below/of new/written", "written", FileType.FILE)
    assert sandbox.files.read("below/of new/written", format="bytes") == expected
    assert b"".join(sandbox.files.read("below/of new/written", format="stream", gzip=True)) == expected


def test_many_files_go_in_one_request_with_their_directories(sandbox: Sandbox) -> None:
    files = [WriteEntry(path=f"many/{n % 7}/ü {n}", data=str(n) * 20_000) for n in range(40)]
    written = sandbox.files.write_files(files)
    assert [each.path for each in written] == [f"/home/user/many/{n % 7}/ü {n}" for n in range(40)]
    assert [sandbox.files.read(each["path"]) for each in files] == [each["data"] for each in files]


@pytest.mark.parametrize(
    ("path", "is_at"),
    [
        ("names", "/home/user/names"),
        ("~/names", "/home/user/names"),
        ("./a/../names", "/home/user/names"),
        ("/home/user//names", "/workspace/names"),
        ("/workspace/names", "/home/user/names"),
        ("/tmp/names", "/tmp/names"),
    ],
)
def test_a_path_is_absolute_or_below_the_home_directory(sandbox: Sandbox, path: str, is_at: str) -> None:
    sandbox.files.write(path, path)
    assert sandbox.commands.run(f"cat {is_at}").stdout == path


def test_a_file_keeps_its_rights_and_a_link_leads_on(sandbox: Sandbox) -> None:
    sandbox.files.write("kept/script", "one")
    sandbox.commands.run("chmod 755 script; ln -s script link", cwd="kept")
    sandbox.files.write("kept/link", "two")
    info = sandbox.files.get_info("kept/script")
    assert (sandbox.files.read("kept/script"), info.mode, info.permissions) == ("two", 0o755, "-rwxr-xr-x")


# Entries


def test_an_entry_has_its_kind_size_rights_owner_and_time(sandbox: Sandbox) -> None:
    sandbox.files.write("entries/file", "12345")
    file, directory = sandbox.files.get_info("entries/file"), sandbox.files.get_info("entries")
    assert (file.path, file.name, file.type, file.size) == ("/home/user/entries/file", "file", FileType.FILE, 5)
    assert (file.mode, file.permissions, file.owner, file.group) == (0o644, "-rw-r--r--", "user", "user")
    assert file.modified_time.timestamp() == pytest.approx(directory.modified_time.timestamp(), abs=60)
    assert (directory.type, directory.mode, directory.permissions) == (FileType.DIR, 0o755, "drwxr-xr-x")
    assert file.symlink_target is None
    assert sandbox.files.get_info("/tmp").permissions == "dtrwxrwxrwx"
    root = sandbox.files.get_info("/")
    assert (root.name, root.path, root.owner == "user") == ("/", "/", False)


def test_a_link_is_described_by_what_it_leads_to(sandbox: Sandbox) -> None:
    sandbox.files.write("links/file", "")
    sandbox.commands.run("ln -s file good; ln -s .. up; ln -s nowhere bad; ln -s loop loop", cwd="links")
    good = sandbox.files.get_info("links/good")
    assert (good.type, good.symlink_target, good.permissions) == (FileType.FILE, "/home/user/links/file", "Lrwxrwxrwx")
    assert (good.mode, sandbox.files.get_info("links/up").type) == (0o644, FileType.DIR)
    for broken in ("bad", "loop"):
        assert sandbox.files.get_info(f"links/{broken}").symlink_target == f"/home/user/links/{broken}"
    assert [each.name for each in sandbox.files.list("links")] == ["file", "good", "up"]


def test_a_listing_goes_to_its_depth_in_the_order_of_a_walk(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir -p tree/a/b/c tree/a-b; touch tree/a/x tree/a/b/y tree/z")
    listed = {depth: [each.path for each in sandbox.files.list("tree", depth=depth)] for depth in (1, 2, 9)}
    top = "/home/user/tree"
    assert listed[1] == [f"{top}/a", f"{top}/a-b", f"{top}/z"]
    assert listed[2] == [f"{top}/a", f"{top}/a/b", f"{top}/a/x", f"{top}/a-b", f"{top}/z"]
    assert listed[9][1:4] == [f"{top}/a/b", f"{top}/a/b/c", f"{top}/a/b/y"]
    assert "/home" in [each.path for each in sandbox.files.list("/")]


def test_a_listing_that_would_be_incomplete_is_refused(sandbox: Sandbox) -> None:
    sandbox.commands.run("mkdir full; cd full; seq 10001 | xargs touch")
    with pytest.raises(SandboxException, match="/home/user/full can't be listed in full"):
        sandbox.files.list("full")
    sandbox.files.remove("full")


def test_directories_are_made_moved_and_removed(sandbox: Sandbox) -> None:
    assert sandbox.files.make_dir("made/below")
    assert not sandbox.files.make_dir("made/below")
    sandbox.files.write("made/below/file", "x")
    with pytest.raises(InvalidArgumentException, match="not a directory"):
        sandbox.files.make_dir("made/below/file")
    info = sandbox.files.rename("made/below", "elsewhere/new/below")
    assert (info.path, info.type) == ("/home/user/elsewhere/new/below", FileType.DIR)
    assert (sandbox.files.exists("made/below"), sandbox.files.read("elsewhere/new/below/file")) == (False, "x")
    sandbox.files.remove("elsewhere")
    sandbox.files.remove("elsewhere")
    assert not sandbox.files.exists("elsewhere")


def test_a_file_moves_between_the_file_systems_of_a_sandbox(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/moving/file", "x")
    assert sandbox.files.rename("/tmp/moving", "moved-here").path == "/home/user/moved-here"
    assert (sandbox.files.read("moved-here/file"), sandbox.files.exists("/tmp/moving")) == ("x", False)


# Refusals


def test_what_is_not_there_is_not_found(sandbox: Sandbox) -> None:
    files = sandbox.files
    for act in (files.read, files.list, files.get_info, lambda path: files.rename(path, "new/place")):
        with pytest.raises(FileNotFoundException, match="missing"):
            act("missing")
    assert not files.exists("missing") and not files.exists("new")


def test_a_path_of_the_wrong_kind_is_refused(sandbox: Sandbox) -> None:
    sandbox.files.write("kinds/file", "")
    for act in (
        lambda: sandbox.files.read("kinds"),
        lambda: sandbox.files.write("kinds", ""),
        lambda: sandbox.files.write("kinds/file/below", ""),
        lambda: sandbox.files.list("kinds/file"),
        lambda: sandbox.files.read("~other/file"),
        lambda: sandbox.files.read("kinds/" + "x" * 5000),
        lambda: sandbox.files.read("/proc/1/mem"),
    ):
        with pytest.raises((InvalidArgumentException, FileNotFoundException)):
            act()
    with pytest.raises(SandboxException, match="403"):
        sandbox.files.write("/usr/file", "")


def test_another_user_is_refused(sandbox: Sandbox) -> None:
    for act in (sandbox.files.read, sandbox.files.list, lambda path, user: sandbox.files.write(path, "", user=user)):
        with pytest.raises(AuthenticationException, match='"root" is not offered'):
            act("x", user="root")


def test_metadata_of_files_is_refused_in_words(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxException, match=r"501.*Metadata of files is not offered"):
        sandbox.files.write("x", "", metadata={"key": "value"})


@pytest.mark.parametrize("gzipped", [False, True])
def test_more_than_the_disk_of_the_sandbox_is_refused(sandbox: Sandbox, gzipped: bool) -> None:
    sandbox.files.write("there", b"x" * (30 * MIB))
    with pytest.raises(NotEnoughSpaceException):
        sandbox.files.write("more", b"x" * (30 * MIB), gzip=gzipped)
    sandbox.files.remove("there")
    assert not sandbox.files.exists("more")


def test_a_bomb_is_refused_before_it_fills_anything(http: httpx.Client) -> None:
    deflate = zlib.compressobj(9, wbits=31)
    bomb = b"".join(deflate.compress(bytes(MIB)) for _ in range(2 * DISK_BYTES // MIB)) + deflate.flush()
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/octet-stream"}
    answer = http.post("/files", params={"path": "bomb"}, content=bomb, headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (507, 507)


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        ({}, b"x", "unsupported content type"),
        ({"Content-Type": "multipart/form-data"}, b"x", ""),
        ({"Content-Type": "multipart/form-data; boundary=B"}, b"--C\r\n", "error reading form"),
        (
            {"Content-Type": "multipart/form-data; boundary=B"},
            b'--B\r\nContent-Disposition: form-data; name="file"; filename="cut"\r\n\r\nhalf',
            "incomplete",
        ),
        (
            {"Content-Type": "multipart/form-data; boundary=B"},
            b"--B\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
            "error reading form",
        ),
        ({"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, b"no gzip", "decompressing"),
        (
            {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
            gzip.compress(b"x" * 1000, mtime=0)[:-9],
            "decompressing",
        ),
        (
            {"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"},
            gzip.compress(b"x", mtime=0) + gzip.compress(b"", mtime=0),
            "one member",
        ),
        (
            {"Content-Type": "multipart/form-data; boundary=B", "Content-Encoding": "gzip"},
            gzip.compress(b'--B\r\nContent-Disposition: form-data; name="note"\r\n\r\n' + b"x" * (5 * MIB), mtime=0),
            "outside of its files",
        ),
        ({"Content-Type": "multipart/form-data; boundary=B"}, b"--B\r\n\r\n\r\n" * 1001, "at most 1000 files"),
        ({"Content-Type": "application/octet-stream", "Content-Encoding": "br"}, b"x", "Content-Encoding: br"),
    ],
)
def test_a_broken_upload_is_refused_and_leaves_nothing(
    http: httpx.Client, sandbox: Sandbox, headers: dict[str, str], body: bytes, says: str
) -> None:
    answer = http.post("/files", params={"path": "cut"}, content=body, headers=headers)
    assert answer.status_code == 400 and says in answer.json()["message"]
    assert not sandbox.files.exists("cut")


def test_an_upload_without_a_path_or_to_one_path_twice_is_refused(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    assert http.post("/files", content=b"x", headers=headers).status_code == 400
    assert http.post("/files", files=[("file", ("", b"x"))]).status_code == 400
    assert http.get("/files").status_code == 400
    twice = http.post("/files", files=[("file", ("twice", b"1")), ("file", ("./twice", b"2"))])
    assert (twice.status_code, "several files" in twice.json()["message"]) == (400, True)
    other = http.post("/files", files=[("file", ("one", b"1")), ("note", ("two", b"2"))])
    assert [each["path"] for each in other.json()] == ["/home/user/one"]


def test_no_browser_takes_a_file_for_a_page_of_the_gateway(http: httpx.Client, sandbox: Sandbox) -> None:
    name = 'a"\r\nX-Evil: 1\r\n<ü>.html'
    sandbox.files.write(f"pages/{name}", "<script>1</script>")
    answer = http.get("/files", params={"path": f"pages/{name}"})
    assert (answer.text, answer.headers["content-type"]) == ("<script>1</script>", "application/octet-stream")
    assert (answer.headers["x-content-type-options"], "x-evil" in answer.headers) == ("nosniff", False)


def test_a_large_file_takes_little_memory(gateway: Gateway, http: httpx.Client, sandbox: Sandbox) -> None:
    process, data = Path(f"/proc/{gateway.process.pid}"), b"x" * (40 * MIB)

    def status_bytes(field: str) -> int:
        return int((process / "status").read_text().partition(f"{field}:")[2].split()[0]) * 1024

    def there_and_back(form: dict[str, Any]) -> None:
        try:
            http.post("/files", params={"path": "large"}, **form).raise_for_status()
            assert http.get("/files", params={"path": "large"}).content == data
        finally:
            sandbox.files.remove("large")

    forms = (
        {"files": {"file": ("x", data)}},
        {"content": data, "headers": {"Content-Type": "application/octet-stream"}},
    )
    there_and_back(forms[0])  # fills what threads and allocators keep
    (process / "clear_refs").write_text("5")  # the peak begins anew
    before = status_bytes("VmRSS")
    for form in forms:
        there_and_back(form)
    assert status_bytes("VmHWM") - before < 20 * MIB


def test_clients_that_are_slow_or_leave_hold_nothing_of_the_sandbox(
    gateway: Gateway, http: httpx.Client, sandbox: Sandbox
) -> None:
    sandbox.files.write("slow", b"x" * (8 * MIB))
    url = httpx.URL(gateway.url)
    head = "".join(f"{name}: {http.headers[name]}\r\n" for name in ("e2b-sandbox-id", "x-access-token"))

    def sent(request: str) -> socket.socket:
        connection = socket.create_connection((url.host, url.port))
        connection.sendall(f"{request} HTTP/1.1\r\nhost: {url.host}\r\n{head}".encode())
        return connection

    with contextlib.ExitStack() as stack:
        for _ in range(24):  # more than a sandbox transfers at one time
            stack.enter_context(sent("GET /files?path=slow")).sendall(b"\r\n")
        assert len(sandbox.files.read("slow")) == 8 * MIB
    for more in ("content-length: 9000000\r\n", "transfer-encoding: chunked\r\n"):
        with sent("POST /files?path=cut") as upload:
            upload.sendall(f"content-type: application/octet-stream\r\n{more}\r\n3\r\nx".encode())
    assert sandbox.files.read("slow")[:1] == "x" and not sandbox.files.exists("cut")


# Whose files


def test_a_signed_url_gives_one_file_to_whoever_has_it(sandbox: Sandbox) -> None:
    upload, download = sandbox.upload_url("signed file"), sandbox.download_url("signed file", "user", 60)
    assert httpx.post(upload, files={"file": ("other name", b"by url")}).json()[0]["path"] == "/home/user/signed file"
    with urllib.request.urlopen(download) as answer:
        assert answer.read() == b"by url"


def test_a_signature_fits_one_path_one_operation_one_user_and_its_time(sandbox: Sandbox) -> None:
    sandbox.files.write("signed", "x")
    download = sandbox.download_url("signed", "user", 60)
    signature = download.partition("signature=")[2].partition("&")[0]
    wrong = [
        download.replace("path=signed", "path=other"),
        download.replace("username=user", "username="),
        download.replace(signature, "v1_" + "A" * 43),
        download.replace("signature=v1", "signature=v2"),
        download.replace("signature_expiration=", "signature_expiration=9"),
        download.replace("signature_expiration=", "signature_expiration=x"),
        download.partition("&signature_expiration")[0],
    ]
    for url in wrong:
        answer = httpx.get(url)
        assert (answer.status_code, answer.json()) == (401, {"code": 401, "message": "invalid signature"}), url
    assert httpx.post(download, files={"file": ("x", b"x")}).json()["message"] == "invalid signature"
    assert httpx.get(sandbox.download_url("signed").partition("&sig")[0]).json()["message"].startswith("missing")
    with pytest.raises(urllib.error.HTTPError) as expired:
        urllib.request.urlopen(sandbox.download_url("signed", "user", use_signature_expiration=-120))
    with expired.value as refusal:
        assert refusal.read() == b'{"code":401,"message":"signature is already expired"}'


def test_only_the_token_of_the_sandbox_opens_its_files(gateway: Gateway, http: httpx.Client) -> None:
    assert http.get("/files", params={"path": "x"}, headers={"X-Access-Token": gateway.token}).status_code == 401
    unknown = http.get("/files", params={"path": "x"}, headers={"E2b-Sandbox-Id": "unknown"})
    assert (unknown.status_code, unknown.json()["message"]) == (502, "The sandbox was not found")
