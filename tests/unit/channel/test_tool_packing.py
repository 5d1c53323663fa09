"""The digests that the daemon keeps of blobs that may be tools; guest/test_tool_set unpacks what is packed here."""

from __future__ import annotations

from executor_server.channel.tool_packing import BlobDigests
from executor_server.core.model import BlobRef, ShippedTool, ToolSource, ToolSpec


def tool(code: ToolSource | BlobRef | bytes) -> ToolSpec:
    return ToolSpec("t", "", (), is_final_answer=False, shipped=ShippedTool(code))


def test_blobs_of_tools_get_the_digests_of_their_bytes() -> None:
    digests = BlobDigests()
    digests.note("a", "12")
    host = ToolSpec("h", "", (), is_final_answer=False)
    inline, source = tool(b"value"), tool(ToolSource("x = 1", "x"))
    assert digests.added_to([host, inline, source]) == [host, inline, source]
    bound = ToolSource("x = 1", "x", BlobRef("a", 3))
    assert digests.added_to([tool(BlobRef("a", 3)), tool(bound), tool(BlobRef("b", 3))]) == [
        tool(BlobRef("a", 3, "12")),
        tool(ToolSource("x = 1", "x", BlobRef("a", 3, "12"))),
        tool(BlobRef("b", 3)),
    ]


def test_only_so_many_digests_are_remembered() -> None:
    digests = BlobDigests()
    for number in range(1000):
        digests.note(f"b{number}", str(number))
    known = [
        spec.shipped.code for spec in digests.added_to([tool(BlobRef(f"b{n}", 1)) for n in range(1000)]) if spec.shipped
    ]
    assert [each.sha256 for each in known if isinstance(each, BlobRef) and each.sha256] == [
        str(n) for n in range(872, 1000)
    ]
