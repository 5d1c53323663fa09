"""The world's name server: one that tests program, also to do what a name server must not.

It answers over UDP, and over TCP when an answer was too big for that. A name that no test has given it does not exist.
"""

from __future__ import annotations

import asyncio
import itertools
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset

PORT = 53
TTL_S = 60
_UDP_BYTES = 512  # the largest answer for a client without EDNS (RFC 1035)
_READ_TIMEOUT_S = 30.0

Behaviour = Callable[[dns.message.Message], Sequence[bytes]]
"""Messages to send for a question: usually one, none of a server that hangs, several of one that lies first."""


@dataclass(frozen=True)
class Question:
    """One that was asked."""

    name: str
    kind: str  # "A", "AAAA", …
    over_tcp: bool


@dataclass
class NameServer:
    """Names and what the server does when it is asked for them. A later call for a name replaces an earlier one."""

    questions: list[Question] = field(default_factory=list)
    delays_s: dict[str, float] = field(default_factory=dict)  # of answers over UDP, by names
    _behaviours: dict[str, Behaviour] = field(default_factory=dict)

    def address(self, name: str, *addresses: str, ttl_s: int = TTL_S) -> None:
        """The name has these addresses, of both families; with none it exists and has no address."""
        self._behaviours[name] = lambda asked: [_answer(asked, addresses, ttl_s)]

    def changing(self, name: str, *addresses: Sequence[str], ttl_s: int = 0) -> None:
        """The first look-up gets the first addresses, the next the next; the last ones stay. IPv4 alone is counted, so
        that a resolver which asks for both families at once has one look-up."""
        turns = itertools.chain(addresses, itertools.repeat(addresses[-1]))

        def behave(asked: dns.message.Message) -> Sequence[bytes]:
            return [_answer(asked, next(turns) if _kind_of(asked) == "A" else (), ttl_s)]

        self._behaviours[name] = behave

    def alias(self, name: str, target: str, *addresses: str) -> None:
        """The name is another's, whose addresses come with the answer."""

        def behave(asked: dns.message.Message) -> Sequence[bytes]:
            answer = dns.message.make_response(asked)
            answer.answer.append(dns.rrset.from_text(asked.question[0].name, TTL_S, "IN", "CNAME", f"{target}."))
            _add_addresses(answer, dns.name.from_text(target), addresses, TTL_S)
            return [answer.to_wire()]

        self._behaviours[name] = behave

    def hang(self, name: str) -> None:
        """The server does not answer questions for the name."""
        self._behaviours[name] = lambda asked: []

    def lose_first(self, name: str, *addresses: str) -> None:
        """The first question of each kind is lost."""
        seen = set()

        def behave(asked: dns.message.Message) -> Sequence[bytes]:
            is_first = _kind_of(asked) not in seen
            seen.add(_kind_of(asked))
            return [] if is_first else [_answer(asked, addresses, TTL_S)]

        self._behaviours[name] = behave

    def fail(self, name: str, code: str) -> None:
        """The server answers with an error: "NXDOMAIN", "SERVFAIL", "REFUSED"."""
        self._behaviours[name] = lambda asked: [_error(asked, code)]

    def malformed(self, name: str, answer: bytes) -> None:
        """The right identifier and then these bytes."""
        self._behaviours[name] = lambda asked: [struct.pack(">H", asked.id) + answer]

    def lie_first(self, name: str, forged: str, *addresses: str) -> None:
        """Two forged answers arrive before the true one: one with another identifier, one to another question."""

        def behave(asked: dns.message.Message) -> Sequence[bytes]:
            wrong_id = bytearray(_answer(asked, (forged,), TTL_S))
            wrong_id[:2] = struct.pack(">H", asked.id ^ 1)
            other = dns.message.make_query("forged.invalid", asked.question[0].rdtype, id=asked.id)
            return [bytes(wrong_id), _answer(other, (forged,), TTL_S), _answer(asked, addresses, TTL_S)]

        self._behaviours[name] = behave

    def forget(self, name: str) -> None:
        """The name does not exist any more."""
        self._behaviours.pop(name, None)

    async def start(self, address: str) -> _Listening:
        """Serves on that address until the returned object is closed. Raises OSError."""
        loop = asyncio.get_running_loop()
        tcp = await asyncio.start_server(self._serve_tcp, address, PORT)
        try:
            udp, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), (address, PORT))
        except OSError:
            tcp.close()
            raise
        return _Listening(tcp, udp)

    def answers_to(self, question: bytes, *, over_tcp: bool) -> Sequence[bytes]:
        """The messages to send; too big ones are cut where the question came over UDP."""
        try:
            asked = dns.message.from_wire(question)
            (one,) = asked.question
        except (dns.exception.DNSException, ValueError):
            return ()
        name = one.name.to_text(omit_final_dot=True).lower()
        self.questions.append(Question(name, _kind_of(asked), over_tcp))
        answers = self._behaviours.get(name, lambda asked: [_error(asked, "NXDOMAIN")])(asked)
        most = max(asked.payload, _UDP_BYTES)
        return [each if over_tcp or len(each) <= most else _truncated(asked) for each in answers]

    async def _serve_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                while True:
                    (length,) = struct.unpack(">H", await reader.readexactly(2))
                    for answer in self.answers_to(await reader.readexactly(length), over_tcp=True):
                        writer.write(struct.pack(">H", len(answer)) + answer)
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the client has what it wanted
        finally:
            writer.close()


@dataclass(frozen=True)
class _Listening:
    tcp: asyncio.Server
    udp: asyncio.DatagramTransport

    def close(self) -> None:
        self.tcp.close()
        self.udp.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, server: NameServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)  # asyncio's own is no subclass of its interface

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        for answer in self._server.answers_to(data, over_tcp=False):
            delay_s = self._server.delays_s.get(self._server.questions[-1].name, 0.0)
            asyncio.get_running_loop().call_later(delay_s, self._transport.sendto, answer, addr)


def _kind_of(asked: dns.message.Message) -> str:
    return dns.rdatatype.to_text(asked.question[0].rdtype)


def _answer(asked: dns.message.Message, addresses: Sequence[str], ttl_s: int) -> bytes:
    answer = dns.message.make_response(asked)
    answer.flags |= dns.flags.AA | dns.flags.RA
    _add_addresses(answer, asked.question[0].name, addresses, ttl_s)
    return answer.to_wire(max_size=65535)


def _add_addresses(answer: dns.message.Message, name: dns.name.Name, addresses: Sequence[str], ttl_s: int) -> None:
    """Adds those of the family that was asked for."""
    kind = _kind_of(answer)
    of_family = [each for each in addresses if (":" in each) == (kind == "AAAA")]
    if kind in ("A", "AAAA") and of_family:
        answer.answer.append(dns.rrset.from_text_list(name, ttl_s, "IN", kind, of_family))


def _error(asked: dns.message.Message, code: str) -> bytes:
    answer = dns.message.make_response(asked)
    answer.set_rcode(dns.rcode.from_text(code))
    return answer.to_wire()


def _truncated(asked: dns.message.Message) -> bytes:
    answer = dns.message.make_response(asked)
    answer.flags |= dns.flags.TC
    return answer.to_wire()
