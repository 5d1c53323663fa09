"""The form of a record of the audit log, and the chain of hashes that joins the records.

A record is a line of JSON:

    {"seq":7,"prev":"…","time":"2026-11-21T09:00:00.000001Z","kind":"execution_requested", … ,"hash":"…"}

`hash` is the SHA-256 of the line up to `,"hash"`, and `prev` is the hash of the record before. The bytes are hashed as
they are in the file: a verifier needs no JSON writer that agrees with ours, and no byte of a line can be changed into
one that means the same. `sha256sum` and a pipe are enough to check one by hand.

Texts of clients and sandboxes are data in a string: everything but printable ASCII is escaped, so that no text ends a
line, steers a terminal or begins a record of its own. A record has at most MAX_RECORD_BYTES; longer texts and lists are
cut, and the record says so.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor_server.guest.wire.lean import dumps

MAX_RECORD_BYTES = 64 * 1024
MAX_CODE_RECORD_BYTES = 1024 * 1024
"""Bytes of a record with the whole code of an execution, or a whole command line, if the profile asks for it."""

MAX_LIST_ENTRIES = 64
MAX_TEXT_CHARS = 512
# Bytes of a record besides its fields: number, hashes, time and kind.
_HEAD_BYTES = 512
_MAX_NUMBER = 2**63
# Bytes of one character as two surrogates, each escaped.
_MAX_ESCAPED_BYTES = 12
# Fields that are recorded whole: an execution's code, and the command line and input of a process.
WHOLE_FIELDS = ("code", "command", "input")
# Bytes of the quotes and the comma around a word of a command line.
_WORD_BYTES = 3
# (entries, characters) of lists and texts in a record that is still too long. With the last pair, every record fits.
_TIGHTER = ((MAX_LIST_ENTRIES, 64), (16, 64), (4, 32), (1, 16))

_HASH_KEY = b',"hash":"'
_END = b'"}\n'
_HASH_CHARS = 64
_TAIL_BYTES = len(_HASH_KEY) + _HASH_CHARS + len(_END)
_FORM = re.compile(
    rb'\{"seq":([1-9][0-9]{0,18}),"prev":"([0-9a-f]{64})","time":"([0-9TZ:.-]{27})","kind":"([a-z_]{1,32})"[ -~]*'
    rb',"hash":"([0-9a-f]{64})"\}\n'
)


class AuditKind(enum.StrEnum):
    """The kinds of records. docs/audit.md explains each."""

    DAEMON_STARTED = "daemon_started"
    DAEMON_STOPPED = "daemon_stopped"
    SESSION_REQUESTED = "session_requested"
    SESSION_CREATED = "session_created"
    SESSION_RECOVERED = "session_recovered"
    SESSION_LOST = "session_lost"
    SESSION_ENDED = "session_ended"
    EXECUTION_REQUESTED = "execution_requested"
    EXECUTION_RECOVERED = "execution_recovered"
    EXECUTION_ENDED = "execution_ended"
    LIMIT_WARNED = "limit_warned"
    IMPORTS_AUTHORIZED = "imports_authorized"
    APPROVAL_REQUESTED = "approval_requested"
    APPROVAL_DECIDED = "approval_decided"
    TOOLS_REGISTERED = "tools_registered"
    TOOL_CALLED = "tool_called"
    TOOL_ANSWERED = "tool_answered"
    VARIABLES_SET = "variables_set"
    VARIABLES_READ = "variables_read"
    FILE_PUT = "file_put"
    FILE_REQUESTED = "file_requested"
    FILE_GOT = "file_got"
    FILE_CHANGED = "file_changed"
    PROCESS_REQUESTED = "process_requested"
    PROCESS_STARTED = "process_started"
    PROCESS_ENDED = "process_ended"
    INPUT_PUT = "input_put"
    SIGNAL_REQUESTED = "signal_requested"
    WATCH_REQUESTED = "watch_requested"
    RENAME_REQUESTED = "rename_requested"
    PORT_REQUESTED = "port_requested"
    PORT_CLOSED = "port_closed"
    STATE_REQUESTED = "state_requested"
    STATE_EXPORTED = "state_exported"
    SAVEPOINT_REQUESTED = "savepoint_requested"
    ROLLBACK_REQUESTED = "rollback_requested"
    STATE_RESTORED = "state_restored"
    CONNECTION_OPENED = "connection_opened"
    CONNECTION_CLOSED = "connection_closed"
    CONNECTION_DENIED = "connection_denied"
    CONNECTIONS_DENIED = "connections_denied"
    ENVIRONMENT_BUILT = "environment_built"
    ENVIRONMENT_REMOVED = "environment_removed"
    SESSION_PLACED = "session_placed"
    SESSION_MOVED = "session_moved"
    NODE_LINKED = "node_linked"
    NODE_LOST = "node_lost"
    REQUEST_REFUSED = "request_refused"
    REQUESTS_REFUSED = "requests_refused"
    CREDENTIALS_REFUSED = "credentials_refused"
    POLICY_RELOADED = "policy_reloaded"
    POLICY_REFUSED = "policy_refused"
    TOKENS_RELOADED = "tokens_reloaded"
    ADMIN_CALLED = "admin_called"
    CONTENT_VIEWED = "content_viewed"
    RECORDING_FETCHED = "recording_fetched"
    GUEST_MISBEHAVED = "guest_misbehaved"
    FILE_REMOVED = "file_removed"
    AUDIT_GAP = "audit_gap"
    AUDIT_REPAIRED = "audit_repaired"


@dataclass(frozen=True)
class Position:
    """A position in the chain: a record's number and hash."""

    seq: int
    hash: str


GENESIS = Position(0, "0" * _HASH_CHARS)
"""The position before the first record."""


@dataclass(frozen=True)
class Link:
    """A line that has the form of a record."""

    seq: int
    prev: str
    time: str
    kind: str
    stated_hash: str
    actual_hash: str

    @property
    def position(self) -> Position:
        return Position(self.seq, self.stated_hash)


def encode(after: Position, time: str, kind: AuditKind, fields: Mapping[str, Any]) -> tuple[bytes, Position]:
    """Encodes the record that follows `after` as a line; returns its position too. `time` is UTC, in microseconds."""
    head = f'{{"seq":{after.seq + 1},"prev":"{after.hash}","time":"{time}","kind":"{kind}"'
    body = head.encode() + _rest(fields)
    digest = hashlib.sha256(body).hexdigest()
    return body + _HASH_KEY + digest.encode() + _END, Position(after.seq + 1, digest)


def read_link(line: bytes) -> Link | None:
    """Reads a line's place in the chain; None when the line does not have the form of a record."""
    form = _FORM.fullmatch(line)
    if form is None:
        return None
    seq, prev, time, kind, stated = (part.decode() for part in form.groups())
    return Link(int(seq), prev, time, kind, stated, hashlib.sha256(line[:-_TAIL_BYTES]).hexdigest())


def read_fields(line: bytes) -> dict[str, Any] | None:
    """Reads all fields of a record; None for a line that is not a JSON object."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# ---------------------------------------------------------------------------------------------------------------------
# Bounds


def clipped(text: str, chars: int = MAX_TEXT_CHARS) -> str:
    """Returns the text, or its beginning with an ellipsis."""
    return text if len(text) <= chars else text[:chars] + "…"


def as_ascii(value: object) -> str:
    """Encodes a value as compact JSON of printable ASCII."""
    # DEL is the one control character that JSON leaves as it is.
    return _ENCODER.encode(value).replace("\x7f", "\\u007f")


_ENCODER = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), check_circular=False)


def _rest(fields: Mapping[str, Any]) -> bytes:
    """The fields as they follow the head of a record, cut until they fit."""
    for whole in WHOLE_FIELDS:
        if whole in fields:
            return _with_whole(fields, whole)
    text = _members(fields if _is_small(fields) else _bounded(dict(fields), MAX_LIST_ENTRIES, MAX_TEXT_CHARS))
    for entries, chars in _TIGHTER:
        if len(text) <= MAX_RECORD_BYTES - _HEAD_BYTES:
            break
        text = _members({**_bounded(dict(fields), entries, chars), "cut": True})
    return text


def _with_whole(fields: Mapping[str, Any], name: str) -> bytes:
    others = _rest({key: value for key, value in fields.items() if key != name})
    budget = MAX_CODE_RECORD_BYTES - MAX_RECORD_BYTES
    # Encoding is bounded, too: no more text than this is escaped and then thrown away.
    kept = _beginning(fields[name], budget)
    written = _members({name: kept})
    if len(written) > budget or kept != fields[name]:
        written = _members({name: _beginning(fields[name], budget // _MAX_ESCAPED_BYTES), f"{name}_cut": True})
    return others + written


def _beginning(value: str | list[str], budget: int) -> str | list[str]:
    """Returns the beginning of a text or a command line that takes at most `budget` bytes if nothing is escaped."""
    if isinstance(value, str):
        return value[:budget]
    kept = []
    for word in value:
        if budget <= _WORD_BYTES:
            break
        kept.append(word[: budget - _WORD_BYTES])
        budget -= len(kept[-1]) + _WORD_BYTES
    return kept


def _members(fields: Mapping[str, Any]) -> bytes:
    """`,"key":value` for each field."""
    # DEL is the one control character that JSON leaves as it is.
    return b"," + dumps(fields)[1:-1].replace(b"\x7f", b"\\u007f") if fields else b""


def _is_small(fields: Mapping[str, Any]) -> bool:
    """True when no field needs a cut, as in nearly every record. The check takes a tenth of the time of `_bounded`."""
    for value in fields.values():
        kind = type(value)
        if kind is str:
            fits = len(value) <= MAX_TEXT_CHARS
        elif kind is int or kind is float:
            fits = -_MAX_NUMBER < value < _MAX_NUMBER
        elif kind is dict:
            fits = _is_small(value)
        elif kind is tuple or kind is list:
            fits = len(value) <= MAX_LIST_ENTRIES and all(
                type(each) is str and len(each) <= MAX_TEXT_CHARS for each in value
            )
        else:
            fits = value is None or kind is bool
        if not fits:
            return False
    return True


def _bounded(value: Any, entries: int, chars: int) -> Any:
    if isinstance(value, str):
        return value if len(value) <= chars else clipped(value, chars)
    if isinstance(value, (int, float)):
        # NaN compares false: it is not JSON. Many readers of JSON have no larger integers.
        return value if -_MAX_NUMBER < value < _MAX_NUMBER else "out of range"
    if isinstance(value, dict):
        # Keys are ours; values may be a client's.
        return {key: _bounded(each, entries, chars) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        kept = [_bounded(each, entries, chars) for each in value[:entries]]
        return kept if len(value) <= entries else [*kept, f"… {len(value) - entries} more"]
    return value
