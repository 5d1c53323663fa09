"""The server's side of a terminated connection: one verified TLS connection at a time, replaced after its end."""

from __future__ import annotations

import asyncio
import ssl

import h11

from executor_server.guest.egress import reasons
from executor_server.guest.egress.connection import Connection
from executor_server.guest.egress.endpoint import DeadlinePassed, Endpoint
from executor_server.guest.egress.forward import RESPONSE_HEAD_BYTES
from executor_server.guest.egress.refusals import Refusal, shown
from executor_server.network.proxy.tls import Intake, TlsStream

HANDSHAKE_S = 15.0


class Server:
    """A connection to the server, and its HTTP machine."""

    def __init__(self, stream: TlsStream) -> None:
        self.stream = stream
        self.machine = h11.Connection(h11.CLIENT, max_incomplete_event_size=RESPONSE_HEAD_BYTES)
        self.was_used = False  # it has answered a request before

    def is_reusable(self) -> bool:
        """False if bytes arrived between two responses: such a connection is untrusted."""
        done = self.machine.our_state is h11.DONE and self.machine.their_state is h11.DONE
        return done and not self.machine.trailing_data[0] and self.stream.is_idle()


class Servers:
    """Owned by one terminated connection."""

    def __init__(self, tunnel: Connection, context: ssl.SSLContext) -> None:
        self._tunnel = tunnel
        self._context = context
        self._current: Server | None = None
        self._has_first = True

    async def connect(self) -> Server:
        """Returns a connection that takes a request. Raises Refusal, Ended."""
        current = self._current
        if current is not None:
            if current.is_reusable():
                current.machine.start_next_cycle()
                current.was_used = True
                return current
            self.close()
        if self._has_first:
            self._has_first = False
            try:
                return await self._handshake(Endpoint(self._tunnel.upstream))
            except Refusal as refusal:
                # It was dialled with the tunnel, and the server may not have waited for the client's first request.
                if refusal.reason != reasons.UNREACHED:
                    raise
        dialled = await self._tunnel.dial()
        try:
            endpoint = Endpoint(dialled.sock)
        except OSError as error:
            dialled.sock.close()
            raise self._refusal(reasons.UNREACHED, "the connection ended at once") from error
        return await self._handshake(endpoint)

    def close(self) -> None:
        """Closes the connection without a TLS close: a response that was cut off must not look complete."""
        if self._current is not None:
            self._current.stream.endpoint.close()
            self._current = None

    async def _handshake(self, endpoint: Endpoint) -> Server:
        tunnel = self._tunnel
        intake = Intake(tunnel.receive_room, tunnel.room_opened, tunnel.count_received)
        stream = TlsStream(endpoint, self._context, server_name=tunnel.target.host, intake=intake)
        try:
            await stream.handshake(asyncio.get_running_loop().time() + HANDSHAKE_S)
        except BaseException as error:
            endpoint.close()
            if isinstance(error, ssl.SSLCertVerificationError):
                why = shown(error.verify_message)
                raise self._refusal(reasons.UPSTREAM_CERTIFICATE, f"its certificate does not verify: {why}") from error
            if isinstance(error, ssl.SSLError):
                raise self._refusal(reasons.UNREACHED, "it breaks the TLS handshake off") from error
            if isinstance(error, DeadlinePassed):
                raise self._refusal(reasons.UNREACHED, "it does not answer the TLS handshake in time") from error
            if isinstance(error, OSError):
                raise self._refusal(reasons.UNREACHED, error.strerror or "the connection broke") from error
            raise
        self._current = Server(stream)
        return self._current

    def _refusal(self, reason: str, clause: str) -> Refusal:
        return Refusal(reason, f"{self._tunnel.target} could not be reached: {clause}", address=self._tunnel.address)
