"""Whether an Engine that does not do it said so, or did not answer at all."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor_server.backends.docker.engine import Engine, EngineFailure
from executor_server.errors import BackendSilent

TIMEOUT_S = 0.05


def answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.fixture
def socket() -> Iterator[Path]:
    """With a short name: the path of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="d-") as made:
        yield Path(made) / "engine.sock"


@pytest.fixture
async def engine(socket: Path) -> AsyncIterator[Engine]:
    engine = Engine(socket, timeout_s=TIMEOUT_S, concurrency=1)
    yield engine
    await engine.close()


async def failure_with(engine: Engine, socket: Path, said: bytes | None) -> EngineFailure:
    """Of an Engine that says this to whatever it is asked, or, when it is None, nothing for ever."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):
            if said is None:
                await ended.wait()
            writer.write(said or b"")
            await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, str(socket))
    try:
        with pytest.raises(EngineFailure) as caught:
            await engine.connect()
        return caught.value
    finally:
        ended.set()
        server.close()
        await server.wait_closed()


async def test_one_that_is_not_there_is_silent(engine: Engine) -> None:
    with pytest.raises(BackendSilent):
        await engine.connect()


@pytest.mark.parametrize("said", [None, b""], ids=["it hangs", "it hangs up"])
async def test_one_that_says_nothing_is_silent(engine: Engine, socket: Path, said: bytes | None) -> None:
    failure = await failure_with(engine, socket, said)
    assert isinstance(failure, BackendSilent)
    assert failure.status is None


@pytest.mark.parametrize(
    "said",
    [
        answer("500 Internal Server Error", '{"message": "no space left on device"}'),
        answer("404 Not Found", "no such page"),
        answer("200 OK", "<html>"),
        answer("200 OK", '{"ApiVersion": []}'),
    ],
)
async def test_one_that_says_anything_is_not_silent(engine: Engine, socket: Path, said: bytes) -> None:
    """Or a client whose request it does not like would have all others pass it over."""
    assert not isinstance(await failure_with(engine, socket, said), BackendSilent)
