"""The reference for everything that crosses the wire: a gRPC service that does nothing but answer.

Like the daemon, the server is grpc.aio on uvloop in a process of its own, but without checks, conversions and anything
behind them; messages are bytes. Its client is the blocking one, with the options that ours uses.
"""

from __future__ import annotations

import asyncio
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop
from grpc.experimental import ChannelOptions

_ORDER = struct.Struct(">II")  # number and size in bytes of the messages to answer with
_STOP_TIMEOUT_S = 10.0


class Echo:
    """One connection to the service."""

    def __init__(self, address: str) -> None:
        options: list[tuple[str, Any]] = [
            ("grpc.use_local_subchannel_pool", 1),
            (ChannelOptions.SingleThreadedUnaryStream, 1),
        ]
        self._channel = grpc.insecure_channel(address, options)
        self._unary: Callable[[bytes], bytes] = self._channel.unary_unary("/echo/Unary", None, None)
        self._stream: Callable[[bytes], Iterable[bytes]] = self._channel.unary_stream("/echo/Stream", None, None)
        self._upload: Callable[[Iterator[bytes]], bytes] = self._channel.stream_unary("/echo/Upload", None, None)

    def unary(self, message: bytes) -> bytes:
        return self._unary(message)

    def stream(self, request_bytes: int, count: int, message_bytes: int) -> Iterable[bytes]:
        """Sends a request of about that size; the answer is `count` messages of a size."""
        order = _ORDER.pack(count, message_bytes)
        return self._stream(order.ljust(request_bytes, b"\0"))

    def upload(self, messages: Iterator[bytes]) -> bytes:
        return self._upload(messages)

    def close(self) -> None:
        self._channel.close()


@contextmanager
def running_echo(directory: Path) -> Iterator[tuple[str, str]]:
    """A server in a process of its own: its Unix and its TCP address."""
    unix_address = f"unix:{directory / 'echo.sock'}"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.echo", unix_address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise RuntimeError("the echo server did not start")
        yield unix_address, f"127.0.0.1:{port}"
    finally:
        process.stdin.close()  # it serves until then
        process.stdout.close()
        process.wait(_STOP_TIMEOUT_S)


# ---------------------------------------------------------------------------------------------------------------------
# The server's process


async def _serve(unix_address: str) -> None:
    server = grpc.aio.server()
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(_answer_unary),
        "Stream": grpc.unary_stream_rpc_method_handler(_answer_stream),
        "Upload": grpc.stream_unary_rpc_method_handler(_answer_upload),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", methods),))
    server.add_insecure_port(unix_address)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def _answer_unary(request: bytes, _context: object) -> bytes:
    return request


async def _answer_stream(request: bytes, context: Any) -> None:
    count, message_bytes = _ORDER.unpack_from(request)
    message = bytes(message_bytes)
    for _ in range(count):
        await context.write(message)


async def _answer_upload(requests: AsyncIterator[bytes], _context: object) -> bytes:
    total = 0
    async for request in requests:
        total += len(request)
    return _ORDER.pack(0, total)


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
