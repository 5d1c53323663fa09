"""Sends the double's answers, whole or as streams of events, and applies faults to them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from aiohttp import web

from tests.support.e2b.faults import Fault, Kind

GARBAGE = b'\x00\xff\x02{"code": [[[\xe2\x80\xa8<html>502'
LINE_SEPARATOR = "\u2028".encode()
PIECE_BYTES = 32_768
CUT_DELAY_S = 0.01
REORDER_WAIT_S = 0.1  # an event that waits for another to be swapped with goes alone after this

_STATUS_OF_CODE = {
    "invalid_argument": 400,
    "failed_precondition": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 429,
    "unimplemented": 501,
    "unavailable": 503,
    "deadline_exceeded": 504,
}


class Cut(Exception):
    """The connection ends here, without another byte."""


class ApiError(Exception):
    """An answer that says no."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    def response(self) -> web.Response:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return web.json_response({"code": self.status, "message": str(self)}, status=self.status, headers=headers)


def connect_error(code: str, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message}, status=_STATUS_OF_CODE.get(code, 500))


class Outgoing:
    """Sends one request's answer; faults of streams are applied here."""

    def __init__(self, request: web.BaseRequest, fault: Fault | None) -> None:
        self._request = request
        self._fault = fault
        self._response: web.StreamResponse | None = None
        self._sent_bytes = 0
        self._events = 0
        self._held: bytes | None = None
        self._noise: Callable[[bytes], bytes] = lambda data: data

    @property
    def holds(self) -> bool:
        """True when an event waits for the next one; after REORDER_WAIT_S it is to be flushed."""
        return self._held is not None

    @property
    def lies(self) -> bool:
        """True when the ids in the stream are to be wrong."""
        return self._fault is not None and self._fault.kind is Kind.WRONG_ID

    async def begin(
        self,
        content_type: str,
        *,
        noise: Callable[[bytes], bytes] = lambda data: data,
    ) -> web.StreamResponse:
        """Sends the head of a stream. `noise` turns random bytes into bytes that look like an event's."""
        if self._fault is not None and self._fault.kind in (Kind.CUT_AFTER, Kind.STATUS_AFTER):
            raise Cut if self._fault.kind is Kind.CUT_AFTER else _error_of(self._fault)
        self._noise = noise
        self._response = web.StreamResponse(headers={"Content-Type": content_type})
        await self._response.prepare(self._request)
        if self._fault is not None and self._fault.kind is Kind.GARBAGE:
            await self._response.write(GARBAGE)
            await self._response.write_eof()
            raise Cut
        return self._response

    async def send(self, event: bytes, *, is_last: bool = False) -> None:
        kind = self._fault.kind if self._fault is not None else None
        self._events += 1
        is_first = self._events == 1
        if kind is Kind.STREAM_NO_END and is_last:
            return
        if is_first:
            await self._write(event)
            await self._after_first(kind)
        elif kind is Kind.STREAM_REORDERED:
            if self._held is None and not is_last:
                self._held = event
                return
            await self._write(event)
            await self.flush()
        elif kind is Kind.STREAM_DUPLICATED:
            await self._write(event)
            await self._write(event)
        else:
            if kind is Kind.STREAM_BLANK_LINES:
                await self._write(self._noise(b"\n\n"))
            if kind is Kind.STREAM_LINE_SEPARATOR:
                await self._write(self._noise(LINE_SEPARATOR))
            await self._write(event)

    async def flush(self) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            await self._write(held)

    async def end(self, last: bytes = b"") -> web.StreamResponse:
        """Ends the stream as if all was well."""
        assert self._response is not None
        await self.flush()
        if last:
            await self._write(last)
        await self._response.write_eof()
        return self._response

    async def _after_first(self, kind: Kind | None) -> None:
        if kind in (Kind.STREAM_GARBAGE, Kind.TRUNCATED):
            await self._write(GARBAGE if kind is Kind.STREAM_GARBAGE else b"")
            await asyncio.sleep(CUT_DELAY_S)
            raise Cut
        if kind is Kind.STREAM_ENDLESS_LINE:
            assert self._fault is not None
            left = self._fault.at_byte
            while left > 0:
                await self._write(self._noise(b"A" * min(left, PIECE_BYTES)))
                left -= PIECE_BYTES

    async def _write(self, data: bytes) -> None:
        assert self._response is not None
        fault = self._fault
        kinds = (Kind.STREAM_CUT, Kind.STREAM_STALL)
        if fault is not None and fault.kind in kinds and self._sent_bytes + len(data) > fault.at_byte:
            fault.cuts += 1
            part = data[: max(0, fault.at_byte - self._sent_bytes)]
            if part:
                await self._response.write(part)
            if fault.kind is Kind.STREAM_STALL:
                await asyncio.Event().wait()  # until the client closes the connection, which cancels
            # After a pause: the bytes that were written must be sent before the connection is cut.
            await asyncio.sleep(CUT_DELAY_S)
            raise Cut
        self._sent_bytes += len(data)
        await self._response.write(data)

    async def send_half(self, response: web.Response) -> None:
        """Sends a whole answer's head and half of its body."""
        body = _body(response)
        half = web.StreamResponse(status=response.status, headers={"Content-Type": response.content_type})
        half.content_length = len(body) or 1
        await half.prepare(self._request)
        if body:
            await half.write(body[: len(body) // 2])
        await asyncio.sleep(CUT_DELAY_S)
        raise Cut


async def strike(
    fault: Fault | None, out: Outgoing, answer: Callable[[], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Returns the answer, changed by the fault. Raises Cut when there is to be none."""
    match fault.kind if fault is not None else None:
        case Kind.DELAY:
            assert fault is not None
            await asyncio.sleep(fault.seconds)
        case Kind.CUT_BEFORE:
            raise Cut
        case Kind.STATUS:
            assert fault is not None
            return _error_of(fault).response()
    response = await answer()
    if fault is None or response.prepared or not isinstance(response, web.Response):
        return response
    match fault.kind:
        case Kind.CUT_AFTER:
            raise Cut
        case Kind.STATUS_AFTER:
            return _error_of(fault).response()
        case Kind.TRUNCATED:
            await out.send_half(response)
        case Kind.GARBAGE:
            status = response.status if response.status != 204 else 200  # 204 has no body
            return web.Response(status=status, body=GARBAGE, content_type=response.content_type)
        case Kind.WRONG_ID:
            text = re.sub(r'("sandboxID": ")[^"]*', r"\1iwrong0000000000000000", _body(response).decode())
            return web.Response(status=response.status, text=text, content_type=response.content_type)
    return response


def _error_of(fault: Fault) -> ApiError:
    return ApiError(fault.status, f"injected: {fault.status}", fault.retry_after_s)


def _body(response: web.Response) -> bytes:
    return response.body if isinstance(response.body, bytes) else b""
