"""A value that a program forges is decoded in the agent's process: no bomb in it may go off there."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import psutil
import pytest

from executor_api.values.packing import pack
from executor_client import OpaqueValue, Outcome, Session, Tool
from tests.support.attacks import LINK
from tests.support.daemon import Daemon

MIB = 1024 * 1024


@pytest.fixture
def session(daemon: Daemon) -> Iterator[Session]:
    with daemon.client() as client, client.create_session(authorized_imports=["*"]) as ready:
        yield ready


VALUES = {
    "random bytes": b"\x00\xff" * 1000,
    "nothing": b"",
    "brackets": pack(b'["list",' * 20_000, []),
    "an array of all memory": pack(b'["np.array","<f8",[1000000,1000000],"C",""]', []),
    "a range of all memory": pack(b'["pd.rangeindex",0,1000000000000,1,null]', []),
    "a number of a million digits": pack(b'["int","' + b"9" * 1_000_000 + b'"]', []),
    "an unknown type": pack(b'["os.system","id"]', []),
}


@pytest.mark.parametrize("bomb", VALUES)
def test_a_forged_value_arrives_as_one_that_cannot_be_decoded(session: Session, bomb: str) -> None:
    session.put_file("bomb", VALUES[bomb])
    before = psutil.Process().memory_info().rss
    send = 'packed = open("bomb", "rb").read()\nsay({"t": "output", "memfd": True}, fds=[memory_file(packed)])\ndone()'
    result = session.execute(f"{LINK}{send}")
    assert (result.outcome, type(result.output)) == (Outcome.SUCCEEDED, OpaqueValue)
    assert psutil.Process().memory_info().rss < before + 64 * MIB


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 1_000_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize("data", [png(50_000, 50_000), b"GIF89a", b"%PDF", b""], ids=["large", "gif", "pdf", "empty"])
def test_a_forged_image_is_not_decoded(session: Session, data: bytes) -> None:
    session.put_file("image", data)
    send = (
        'say({"t": "image", "call": "c", "mime": "image/png", "source": "figure"}, open("image", "rb").read())\n40 + 2'
    )
    result = session.execute(f"{LINK}{send}")
    assert (result.output, result.images) == (42, [])


def test_a_tool_gets_no_forged_arguments(session: Session) -> None:
    called: list[object] = []
    session.register_tools({"tool": lambda *args: called.append(args)})
    forged = pack(b'["np.array","<f8",[1000000,1000000],"C",""]', [])
    result = session.execute(
        f'{LINK}say({{"t": "tool_call", "call": "c", "name": "tool"}}, {forged!r})\nlink.recv(9)\n1'
    )
    assert called == []
    assert result.outcome in (Outcome.SUCCEEDED, Outcome.CRASHED)


def test_the_final_answer_is_the_tools_own_object_whatever_the_program_says(session: Session) -> None:
    answer_given = object()
    session.register_tools({"answer": Tool(lambda: answer_given, is_final_answer=True)})
    forge = f"{LINK}say({{'t': 'output'}}, b'forged')\ntry:\n    answer()\nexcept BaseException:\n    pass\n'mine'"
    result = session.execute(forge)
    assert (result.is_final_answer, result.output) == (True, answer_given)
