"""The audit log as operators see it: the newest records that match, older ones page by page, and new ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.api import checks
from executor_server.api.one_at_a_time import OneAtATime
from executor_server.core import PreconditionFailed, Principal, Reason, Unavailable
from executor_server.policy.audit import AuditLog, Found, Record, Wanted, search

MAX_RECORDS = 1000
DEFAULT_RECORDS = 100
LOOK_INTERVAL_S = 0.5
"""Seconds between checks for new records, with `follow`."""

_MESSAGE_RECORDS = 100
_MESSAGE_BYTES = 2**20  # of records, after which no further one goes into a message
_MAX_KINDS = 64
_MAX_TEXT_CHARS = 256
_log = structlog.get_logger(__name__)


class AuditView:
    """Shows the log of a daemon or a front in this directory; `log` is None if there is none."""

    def __init__(self, log: AuditLog | None, directory: Path) -> None:
        self._log = log
        self._directory = directory
        # One search at a time: each takes about a tenth of a second of a processor at most.
        self._searching = OneAtATime()

    async def tail(
        self, caller: Principal, request: admin_pb.TailAuditRequest
    ) -> AsyncGenerator[admin_pb.TailAuditResponse]:
        """Yields the records that the caller may see. Raises InvalidRequest, PreconditionFailed, Unavailable."""
        if self._log is None:
            raise PreconditionFailed(Reason.AUDIT_UNAVAILABLE, "no audit log is configured: set audit.enabled to true")
        wanted = _wanted_from(request)
        if not caller.is_admin:
            if wanted.tenant not in ("", caller.tenant):
                yield admin_pb.TailAuditResponse(complete=True)
                return
            wanted = replace(wanted, tenant=caller.tenant)
        # Read before the search, which may find newer records.
        written_seq = self._log.position.seq
        found = await self._search(caller.tenant, wanted)
        for message in _messages(found):
            yield message
        while request.follow:
            seen_seq = max([written_seq, *(record.seq for record in found.records[:1])])
            await asyncio.sleep(LOOK_INTERVAL_S)
            written_seq = self._log.position.seq
            if written_seq > seen_seq:
                found = await self._search(caller.tenant, replace(wanted, before_seq=0, after_seq=seen_seq))
                if found.records or found.continue_before_seq:
                    for message in _messages(found):
                        yield message

    async def _search(self, tenant: str, wanted: Wanted) -> Found:
        try:
            return await self._searching.run(tenant, partial(search, self._directory, wanted))
        except OSError as error:
            _log.error("audit_not_read", error=str(error))
            message = "the audit log can't be read now; see the daemon's log"
            raise Unavailable(Reason.AUDIT_UNAVAILABLE, message) from error


def _wanted_from(request: admin_pb.TailAuditRequest) -> Wanted:
    """Raises InvalidRequest."""
    if request.node:
        raise checks.invalid("node", "can be set at the front of a fleet only; this daemon is not one")
    if len(request.kinds) > _MAX_KINDS:
        raise checks.invalid("kinds", f"has more than {_MAX_KINDS} entries")
    if len(request.text) > _MAX_TEXT_CHARS:
        raise checks.invalid("text", f"has more than {_MAX_TEXT_CHARS} characters")
    if request.max_records > MAX_RECORDS:
        raise checks.invalid("max_records", f"is above {MAX_RECORDS:,}")
    return Wanted(
        tenant=checks.tenant_or_all(request.tenant),
        session=checks.identifier(request.session_id, "session_id") if request.session_id else "",
        kinds=frozenset(request.kinds),
        text=request.text,
        before_seq=request.before_seq,
        most=request.max_records or DEFAULT_RECORDS,
    )


def _messages(found: Found) -> Iterator[admin_pb.TailAuditResponse]:
    """The messages of one list, the oldest record first; the last one is complete."""
    message, size_bytes = admin_pb.TailAuditResponse(), 0
    for record in reversed(found.records):
        if len(message.records) == _MESSAGE_RECORDS or size_bytes >= _MESSAGE_BYTES:
            yield message
            message, size_bytes = admin_pb.TailAuditResponse(), 0
        message.records.append(_record_to(record))
        size_bytes += len(record.json)
    message.complete, message.continue_before_seq = True, found.continue_before_seq
    yield message


def _record_to(record: Record) -> admin_pb.AuditRecord:
    return admin_pb.AuditRecord(seq=record.seq, json=record.json, is_sound=record.is_sound)
