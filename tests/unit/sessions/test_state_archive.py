"""Archives of a session's state: signed, opened again, and refused for every way of not being whole or not ours."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import struct
import tempfile
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor_server.core.errors import ExecutorError, Forbidden, InvalidRequest, Reason, ResourceExhausted
from executor_server.core.model import StateManifest, StateOmission
from executor_server.sessions import state_archive
from executor_server.sessions.state_archive import MAGIC, Opened, Spool, StateArchives, header_of
from tests.support.rounds import rounds

MANIFEST = StateManifest(("a", "ä"), (StateOmission("b", "why"),), 1, 7, (StateOmission("link", "a link"),), "3.11.7")


@pytest.fixture
def archives(tmp_path: Path) -> StateArchives:
    return StateArchives(tmp_path / "states", b"a key of this daemon")


async def written(
    archives: StateArchives, variables: bytes = b"pickles", files: bytes = b"tar" * 100, tenant: str = "me"
) -> bytes:
    with archives.spool("me", 10**7) as spool:
        parts = []
        for part in (variables, files):
            for start in range(0, len(part), 1000):
                await spool.write(part[start : start + 1000])
            parts.append(spool.end_part())
        header = header_of(tenant, "s1", archives.key_id, (parts[0], parts[1]), MANIFEST)
        return b"".join([piece async for piece in archives.signed(header, spool)])


async def opened(archives: StateArchives, data: bytes, *, allow_foreign: bool = False) -> tuple[Opened, bytes, bytes]:
    with archives.spool("me", 10**8) as spool:
        await spool.write(data)
        archive = await archives.opened(spool, "me", allow_foreign=allow_foreign)
        return archive, await joined(archive.variables()), await joined(archive.files())


async def joined(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def refusal(archives: StateArchives, data: bytes, **how: Any) -> ExecutorError:
    with pytest.raises(ExecutorError) as refused:
        asyncio.run(opened(archives, data, **how))
    return refused.value


@pytest.mark.parametrize(("variables", "files"), [(b"", b""), (b"v" * 700_000, b"f"), (b"v", b"f" * 700_000)])
async def test_an_archive_comes_back_as_it_was(archives: StateArchives, variables: bytes, files: bytes) -> None:
    archive, *parts = await opened(archives, await written(archives, variables, files))
    assert parts == [variables, files] and not archive.is_foreign
    assert archive.header.manifest == MANIFEST and archive.header.session_id == "s1"


def test_no_byte_of_an_archive_can_be_changed(archives: StateArchives) -> None:
    data = asyncio.run(written(archives))
    for place in range(0, len(data), rounds(1, 5)):
        harmed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        # A changed key id makes it an archive of an unknown daemon; no other change does.
        assert isinstance(refusal(archives, harmed), (InvalidRequest, Forbidden))


@settings(max_examples=rounds(60, 20), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(kept=st.floats(0, 1), more=st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_worse(archives: StateArchives, kept: float, more: bytes) -> None:
    whole = asyncio.run(written(archives))
    garbage = whole[: int(kept * len(whole))] + more
    for allow in (False, True):
        found = refusal(archives, garbage, allow_foreign=allow) if garbage != whole else None
        assert found is None or isinstance(found, (InvalidRequest, Forbidden))


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"variables": {"size_bytes": -1, "sha256": ""}},
        {"variables": {"size_bytes": 10**30, "sha256": ""}},
        {"manifest": []},
        {"manifest": {"variables": ["a"] * 5000}},
        {"tenant": 1},
        {"created_s": True},
    ],
)
def test_a_header_of_another_form_is_refused_though_foreign_ones_are_allowed(
    archives: StateArchives, change: dict[str, Any]
) -> None:
    data = asyncio.run(written(archives))
    start = len(MAGIC) + 4
    (length,) = struct.unpack("!I", data[len(MAGIC) : start])
    header = {**json.loads(data[start : start + length]), "key_id": "0" * 16, **change}
    text = json.dumps(header).encode()
    found = refusal(archives, MAGIC + struct.pack("!I", len(text)) + text + data[start + length :], allow_foreign=True)
    assert found.reason is Reason.STATE_INVALID


def test_a_header_that_claims_to_be_huge_is_not_read(archives: StateArchives) -> None:
    data = MAGIC + struct.pack("!I", 2**32 - 1) + bytes(1000)
    assert "too large" in refusal(archives, data).message


async def test_an_archive_of_another_tenant_is_foreign(archives: StateArchives) -> None:
    data = await written(archives, tenant="other")
    with pytest.raises(Forbidden) as refused:
        await opened(archives, data)
    assert refused.value.reason is Reason.STATE_FOREIGN and "other" not in refused.value.message.replace("another", "")
    assert (await opened(archives, data, allow_foreign=True))[0].is_foreign


async def test_an_archive_of_another_key_is_foreign_and_must_be_whole(tmp_path: Path, archives: StateArchives) -> None:
    data = await written(StateArchives(tmp_path / "others", b"another key"))
    with pytest.raises(Forbidden):
        await opened(archives, data)
    assert (await opened(archives, data, allow_foreign=True))[0].is_foreign
    with pytest.raises(InvalidRequest):
        await opened(archives, data[:-40] + b"x" + data[-39:], allow_foreign=True)


async def test_one_that_claims_our_key_without_it_is_refused_though_foreign_ones_are_allowed(
    tmp_path: Path, archives: StateArchives
) -> None:
    forger = StateArchives(tmp_path / "others", b"another key")
    forger.key_id = archives.key_id
    with pytest.raises(InvalidRequest):
        await opened(archives, await written(forger), allow_foreign=True)


async def test_a_spool_has_a_limit_and_leaves_nothing_behind(tmp_path: Path, archives: StateArchives) -> None:
    with pytest.raises(ResourceExhausted) as refused, archives.spool("me", 10) as spool:
        await spool.write(b"12345678901")
    assert refused.value.reason is Reason.TOO_LARGE
    assert not list((tmp_path / "states").iterdir())


async def test_a_tenant_cannot_take_the_places_of_others(archives: StateArchives) -> None:
    with archives.spool("greedy", 10), archives.spool("greedy", 10):
        with pytest.raises(ResourceExhausted) as refused, archives.spool("greedy", 10):
            pass
        assert refused.value.retry_after_s is not None
        with archives.spool("modest", 10):
            pass
    with archives.spool("greedy", 10):
        pass


async def test_all_tenants_together_have_so_many_places(
    archives: StateArchives, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_archive, "MAX_AT_A_TIME", 1)
    with archives.spool("a", 10), pytest.raises(ResourceExhausted), archives.spool("b", 10):
        pass


async def test_a_full_disk_is_said_to_be_one_and_may_have_room_later() -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:  # noqa: ASYNC230 (it is no disk)
        spool = Spool(full, 100)
        with pytest.raises(ResourceExhausted) as refused:
            await spool.write(b"1")
    assert refused.value.retry_after_s is not None and refused.value.reason is Reason.QUEUE_FULL


async def test_a_disk_without_room_for_another_file_takes_no_place(
    archives: StateArchives, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryFile", full)
        for _ in range(state_archive.MAX_OF_TENANT + 1):
            with pytest.raises(ResourceExhausted) as refused, archives.spool("me", 10):
                pass
            assert "no room" in refused.value.message and refused.value.retry_after_s is not None
    with archives.spool("me", 10):
        pass


class Stingy(io.FileIO):
    """Writes a few bytes at a time, as a disk that is about to be full does."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data[:3]))


async def test_a_spool_writes_all_that_it_says(tmp_path: Path) -> None:
    with Stingy(tmp_path / "file", "w+") as file:
        spool = Spool(file, 100)
        await spool.write(b"1234567890")
        assert spool.at(0, 10) == b"1234567890"


def with_header(text: bytes) -> bytes:
    return MAGIC + struct.pack("!I", len(text)) + text + bytes(32)


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"1,", b'"abc",', b"["])
def test_a_header_of_many_parts_costs_no_more_than_its_bytes(archives: StateArchives, filler: bytes) -> None:
    """4 MiB of empty lists take 130 MiB when parsed, and any client may send them."""
    size = state_archive.MAX_HEADER_BYTES - 100
    data = with_header(b'{"version":1,"x":[' + filler * (size // len(filler)) + b"0]}")
    tracemalloc.start()
    try:
        found = refusal(archives, data, allow_foreign=True)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.reason is Reason.STATE_INVALID and peak_bytes < 48 * 1024 * 1024


async def test_what_an_archive_has_of_its_own_key_is_read_after_its_signature(
    archives: StateArchives, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = await written(archives)
    seen: list[str] = []
    is_signed, read = StateArchives._is_signed, state_archive._read_header

    def signature(*args: Any) -> bool:
        seen.append("signature")
        return is_signed(*args)

    def header(text: bytes) -> state_archive.Header:
        seen.append("header")
        return read(text)

    monkeypatch.setattr(StateArchives, "_is_signed", signature)
    monkeypatch.setattr(state_archive, "_read_header", header)
    await opened(archives, data)
    assert seen == ["signature", "header"]
