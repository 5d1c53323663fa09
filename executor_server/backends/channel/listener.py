"""Takes the egress proxy's listener out of a sandbox, over a connection of its own to the guest.

The guest's other connection is an asyncio transport, which can't receive descriptors; here a plain socket is read in
the event loop.

Attacks. The process that answers may be hostile, and may send any number of descriptors of any kind. The buffer has
room for one, and the kernel closes the others. Its kind and address are checked before anything else is done with it: a
proxy that accepted on another socket would wait for ever, or serve other programs. A refused descriptor is closed
without waiting, because a socket can be set to linger until its peer has taken the sent data. The guest keeps a
descriptor of the same open socket and can change its options later, O_NONBLOCK among them, so the code that accepts
must not depend on them.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from pathlib import Path

from executor_server.backends.channel.endpoint import RefusedError, UnreachedError
from executor_server.core import SandboxFailure
from executor_server.guest.wire.egress_listener import LISTENER_ADDRESS
from executor_server.guest.wire.frames import PROTOCOL_VERSION, FrameDecoder, FrameError, encode_frame
from executor_server.guest.wire.lean import passed_descriptors
from executor_server.guest.wire.messages import Listener, TakeListener
from executor_server.guest.wire.schema import message_of

# Seconds for the guest to answer. It does so between two turns of its loop.
_ANSWER_TIME_S = 5.0
_ANSWER_BYTES = 1024
_ONE_DESCRIPTOR = socket.CMSG_LEN(array.array("i").itemsize)  # not CMSG_SPACE: its padding has room for a second one
_KIND_OPTIONS = (socket.SO_DOMAIN, socket.SO_TYPE, socket.SO_PROTOCOL, socket.SO_ACCEPTCONN)
_LISTENER_KIND = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, 1)
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: close without waiting


async def take_listener(socket_path: Path, token: str) -> socket.socket:
    """Returns the listener, which doesn't block. Raises SandboxFailure; UnreachedError when a retry may succeed."""
    request = encode_frame(TakeListener.kind, TakeListener(token=token, protocol=PROTOCOL_VERSION).head())
    passed: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            connection.connect(str(socket_path))  # a Unix socket connects at once or not at all
            connection.sendall(request)  # fits into an empty buffer
            async with asyncio.timeout(_ANSWER_TIME_S):
                await _receive_answer(connection, passed)
        return _checked(passed)
    except TimeoutError as error:
        raise UnreachedError(f"the guest did not hand its listener out within {_ANSWER_TIME_S:g} s") from error
    except OSError as error:
        raise UnreachedError(f"the guest did not hand its listener out: {error.strerror}") from error
    finally:
        for fd in passed:
            _discard(fd)


async def _receive_answer(connection: socket.socket, passed: list[int]) -> None:
    """Reads the one frame that is expected, and adds the descriptors that came with it to `passed`."""
    decoder, received = FrameDecoder(), 0
    while received < _ANSWER_BYTES:
        await _readable(connection)
        try:
            data, ancillary, _, _ = connection.recvmsg(_ANSWER_BYTES, _ONE_DESCRIPTOR, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            continue
        passed += passed_descriptors(ancillary)
        if not data:
            raise RefusedError("the guest did not hand its listener out")
        received += len(data)
        try:
            frames = decoder.feed(data)
            if frames and isinstance(message_of(frames[0]), Listener):
                return
        except FrameError as error:
            raise SandboxFailure(f"the guest broke the protocol: {error}") from error
        if frames:
            break
    raise SandboxFailure("the guest answered with something else than its listener")


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def _checked(passed: list[int]) -> socket.socket:
    """Takes the descriptor out of `passed` when it is the listener. Raises SandboxFailure otherwise."""
    if len(passed) != 1:
        raise SandboxFailure(f"the guest handed out {len(passed)} descriptors in place of one listener")
    try:
        listener = socket.socket(fileno=passed[0])
    except OSError as error:
        raise SandboxFailure("the guest handed out something else than a socket") from error
    kind = tuple(listener.getsockopt(socket.SOL_SOCKET, option) for option in _KIND_OPTIONS)
    if kind != _LISTENER_KIND or listener.getsockname() != LISTENER_ADDRESS:
        listener.detach()
        raise SandboxFailure("the guest handed out another socket than its listener")
    passed.clear()
    listener.setblocking(False)
    return listener


def _discard(fd: int) -> None:
    try:
        refused = socket.socket(fileno=fd)
    except OSError:  # no socket
        os.close(fd)
        return
    with refused, contextlib.suppress(OSError):
        refused.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)
