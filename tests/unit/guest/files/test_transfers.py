"""Staged blobs: how long they wait for the message that names them, and which make room for others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from executor_server.guest.files.transfers import BLOB_TIME_S, MAX_BLOB_BYTES, MAX_BLOBS, Transfers
from executor_server.guest.wire.messages import BlobBegin, BlobData
from tests.support.descriptors import none_left_open


class Staged:
    """Blobs of a session, by a clock of its own."""

    def __init__(self, root: Path) -> None:
        self.refused: list[str] = []
        channel: Any = SimpleNamespace(
            connected=True, done=lambda op: None, fail=lambda op, reason, message: self.refused.append(message)
        )
        self.transfers = Transfers(channel, str(root), lambda path, status: None)
        self.now = time.monotonic()
        self.later(0)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.transfers.expire_blobs(self.now)

    def upload(self, name: str, size: int = 1) -> None:
        self.transfers.begin_blob(BlobBegin(op=1, blob=name, size=size))
        if size == 1:
            self.transfers.add_to_blob(BlobData(blob=name), memoryview(b"x"))

    def take(self, name: str) -> bool:
        fd = self.transfers.take_blob(name)
        if fd is not None:
            os.close(fd)
        return fd is not None


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    with none_left_open():
        made = Staged(tmp_path)
        yield made
        made.transfers.close_all()


def test_a_blob_waits_for_the_others_of_its_message(staged: Staged) -> None:
    """Two large values on a slow line: the first expired while the second was uploaded."""
    staged.upload("first")
    staged.upload("second", 2)
    for _ in range(2):
        staged.later(BLOB_TIME_S * 0.9)
        staged.transfers.add_to_blob(BlobData(blob="second"), memoryview(b"x"))
    assert staged.take("first") and staged.take("second")


def test_blobs_that_no_message_names_expire(staged: Staged) -> None:
    staged.upload("named")
    staged.upload("other")
    staged.transfers.claim_blob("named")
    staged.later(BLOB_TIME_S)
    assert (staged.take("other"), staged.take("named")) == (False, True)


def test_blobs_that_no_message_names_make_room(staged: Staged) -> None:
    """Uploads that keep coming keep them from expiring, and they must not keep their room for as long."""
    staged.upload("left", MAX_BLOB_BYTES - 10)
    staged.later(BLOB_TIME_S * 0.9)
    staged.upload("young")
    staged.later(BLOB_TIME_S * 0.9)
    staged.upload("large", MAX_BLOB_BYTES - 1)
    assert not staged.refused and staged.take("young")
    staged.upload("another", 2)
    assert "at most 1,024 values and 268,435,456 bytes" in staged.refused[0]


def test_one_message_may_name_as_many_blobs_as_variables(staged: Staged) -> None:
    for number in range(MAX_BLOBS):
        staged.upload(str(number))
    assert not staged.refused
    staged.upload("one more")
    assert len(staged.refused) == 1


def test_a_sandbox_without_descriptors_refuses_a_blob(staged: Staged, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", fail)
    staged.upload("x")
    assert staged.refused == ["the sandbox can't hold another value: Too many open files"]
