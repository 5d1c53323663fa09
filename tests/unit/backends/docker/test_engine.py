"""A refusal of the Engine is distinguished from an Engine that does not answer."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor_server.backends.docker.engine import Engine, EngineFailure
from executor_server.core.errors import BackendSilent

TIMEOUT_S = 0.5


def answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


@pytest.fixture
def socket() -> Iterator[Path]:
    """A path with a short name: that of a Unix socket has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="d-") as made:
        yield Path(made) / "engine.sock"


@pytest.fixture
async def engine(socket: Path) -> AsyncIterator[Engine]:
    engine = Engine(socket, timeout_s=TIMEOUT_S, concurrency=1)
    yield engine
    await engine.close()


async def failure_with(engine: Engine, socket: Path, said: bytes | None) -> EngineFailure:
    """Returns the failure of a request to an Engine that answers `said` to all, or with None never answers."""
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


async def test_a_missing_engine_is_silent(engine: Engine) -> None:
    with pytest.raises(BackendSilent):
        await engine.connect()


@pytest.mark.parametrize("said", [None, b""], ids=["it hangs", "it hangs up"])
async def test_an_engine_without_an_answer_is_silent(engine: Engine, socket: Path, said: bytes | None) -> None:
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
async def test_an_engine_with_any_answer_is_not_silent(engine: Engine, socket: Path, said: bytes) -> None:
    """Otherwise one client's bad request would make the fail-over skip this backend for all others."""
    assert not isinstance(await failure_with(engine, socket, said), BackendSilent)
