"""The digests that the daemon makes of blobs that may be tools; guest/test_tool_set unpacks what is packed here."""

from __future__ import annotations

import hashlib

import pytest

from executor_server.backends.channel import tool_packing
from executor_server.backends.channel.tool_packing import BlobDigests
from executor_server.core.model import BlobRef, ShippedTool, ToolSource, ToolSpec
from executor_server.guest.files.transfers import MAX_BLOBS


def tool(code: ToolSource | BlobRef | bytes) -> ToolSpec:
    return ToolSpec("t", "", (), is_final_answer=False, shipped=ShippedTool(code))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def known(digests: BlobDigests, *blob_ids: str) -> list[str | None]:
    """The digests of these blobs as the audit log gets them, when tools name them."""
    specs = digests.added_to([tool(BlobRef(blob_id, 1)) for blob_id in blob_ids])
    return [spec.shipped.code.sha256 for spec in specs if spec.shipped and isinstance(spec.shipped.code, BlobRef)]


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blobs are held for no time."""
    monkeypatch.setattr(tool_packing, "HOLD_S", 0.0)


def test_blobs_of_tools_get_the_digests_of_their_bytes() -> None:
    digests = BlobDigests()
    digests.hold("a", [b"1", b"2"])
    host = ToolSpec("h", "", (), is_final_answer=False)
    inline, source = tool(b"value"), tool(ToolSource("x = 1", "x"))
    assert digests.added_to([host, inline, source]) == [host, inline, source]
    bound, its_digest = ToolSource("x = 1", "x", BlobRef("a", 3)), sha256(b"12")
    assert digests.added_to([tool(BlobRef("a", 3)), tool(bound), tool(BlobRef("b", 3))]) == [
        tool(BlobRef("a", 3, its_digest)),
        tool(ToolSource("x = 1", "x", BlobRef("a", 3, its_digest))),
        tool(BlobRef("b", 3)),
    ]


@pytest.mark.usefixtures("at_once")
async def test_a_blob_that_is_named_late_has_its_digest() -> None:
    digests = BlobDigests()
    digests.hold("a", [b"late"])
    await digests.settle("a")
    assert known(digests, "a") == [sha256(b"late")]


@pytest.mark.usefixtures("at_once")
async def test_a_blob_that_was_no_tool_is_never_digested(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(_pieces: object) -> str:
        raise AssertionError("a variable was digested")

    digests = BlobDigests()
    digests.hold("a", [b"a variable"])
    digests.drop(["a", "never staged"])
    monkeypatch.setattr(tool_packing, "_sha256", never)
    await digests.settle("a")
    assert known(digests, "a") == [None]


def test_only_so_many_digests_are_remembered() -> None:
    digests = BlobDigests()
    for number in range(3000):
        digests.hold(f"b{number}", [b"%d" % number])
    assert known(digests, "b0", "b900") == [None, None]
    assert None not in known(digests, *(f"b{number}" for number in range(3000 - MAX_BLOBS, 3000)))
