"""The tokens in force: maps the token of a call to its principal.

`Tokens` holds the content of the file when it was last valid. A look-up takes the same steps for every wrong token: the
entry of its id, or a placeholder when there is none; a comparison of digests in constant time; the check of its
validity. The answer does not say which of these failed, so a caller can't search for ids.

A file that has become unreadable, malformed or readable by others changes nothing: the earlier tokens stay in force,
and the log says so once as an error. A missing file stands for no tokens.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import structlog

from executor_server.core import Principal
from executor_server.policy.identity.token_file import (
    FileVersion,
    TokenFileError,
    TokenRecord,
    digest_of,
    parse_token,
)

LOCAL_PRINCIPAL = Principal(tenant="local", name="token", is_admin=True)
"""The principal of the token in the state directory: the user who runs the daemon."""

_LOCAL_ID = ""  # no token of the file has it

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Entry:
    digest: str
    principal: Principal
    record: TokenRecord | None  # None never expires

    def is_valid(self, now: datetime) -> bool:
        return self.record is None or self.record.is_valid(now)


@dataclass(frozen=True)
class TokenNews:
    """A change of the tokens: ids that were added, changed or removed; or the problem that prevented a change."""

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problem: str = ""


class TokenSource(Protocol):
    """The records that tokens are read from: a TokenFile, or a wrapper of one."""

    def version(self) -> FileVersion | None: ...

    def read(self) -> tuple[TokenRecord, ...]: ...


# No secret has this digest. An unknown id is compared with it, so that it takes as long as a known one.
_NO_ENTRY = _Entry("0" * 64, Principal(tenant="", name=""), None)


class Tokens:
    """Every token that the daemon accepts."""

    def __init__(
        self,
        local_token: str,
        file: TokenSource | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Reads the file. Raises TokenFileError."""
        self._local = _Entry(digest_of(local_token), LOCAL_PRINCIPAL, None)
        self._file = file
        self._now = now
        self._entries = {_LOCAL_ID: self._local}
        self._tenants: Set[str] = frozenset({self._local.principal.tenant})
        self._seen: FileVersion | None = None  # of the content that was read last, valid or not; None: no file
        self._reading = asyncio.Lock()  # one reading at a time: an older one must not overwrite a newer one
        self._reported = ""  # the last problem that was logged
        self._listeners: list[Callable[[TokenNews], None]] = []
        if file is not None:
            self._seen = file.version()
            self._take(self._read())

    def id_of(self, token: str) -> str | None:
        """Returns the id of an accepted token; None for every other text."""
        token_id, secret = parse_token(token) or (_LOCAL_ID, token)
        entry = self._entries.get(token_id, _NO_ENTRY)
        matches = hmac.compare_digest(digest_of(secret), entry.digest)
        valid = entry.is_valid(self._now())
        return token_id if matches and valid and entry is not _NO_ENTRY else None

    @property
    def tenants(self) -> Set[str]:
        """The tenants with a token that was valid when the file was read."""
        return self._tenants

    def principal_of_id(self, token_id: str) -> Principal | None:
        """Returns the owner of a token; None when it is unknown or no longer valid."""
        entry = self._entries.get(token_id)
        return entry.principal if entry is not None and entry.is_valid(self._now()) else None

    def listen(self, listener: Callable[[TokenNews], None]) -> None:
        """Calls `listener` with every later change of the tokens."""
        self._listeners.append(listener)

    async def refresh(self) -> None:
        """Reads the file if it has changed; a file that can't be used is logged."""
        try:
            if self._file is not None and self._file.version() != self._seen:
                await self.reload()
        except TokenFileError as error:
            if str(error) != self._reported:
                self._reported = str(error)
                _log.error("token_file_refused", problem=self._reported, tokens_in_force=len(self._entries) - 1)
                self._notify(TokenNews(problem=self._reported))

    async def reload(self) -> bool:
        """Reads the file. Returns True when the tokens changed. Raises TokenFileError and then changes nothing."""
        if self._file is None:
            return False
        async with self._reading:
            # Taken before the reading: a write in between makes another version, which is read the next time.
            version = self._file.version()
            before = self._entries
            try:
                self._take(await asyncio.to_thread(self._read))  # a large file takes a while to parse
            except TokenFileError as error:
                # A file that the system could not read, as without a free descriptor, is read again the next time. So
                # is one whose reading was cancelled.
                if not isinstance(error.__cause__, OSError):
                    self._seen = version
                raise
            self._seen = version
            self._reported = ""
            if self._entries == before:
                return False
            _log.info("tokens_changed", tokens_in_force=len(self._entries) - 1)
            self._notify(_news(before, self._entries))
            return True

    def _notify(self, news: TokenNews) -> None:
        for listener in self._listeners:
            listener(news)

    def _take(self, entries: dict[str, _Entry]) -> None:
        now = self._now()
        self._entries = entries
        self._tenants = frozenset(entry.principal.tenant for entry in entries.values() if entry.is_valid(now))

    def _read(self) -> dict[str, _Entry]:
        assert self._file is not None
        entries = {_LOCAL_ID: self._local}
        for record in self._file.read():
            principal = Principal(record.tenant, f"token:{record.name}:{record.id}", record.admin, record.roles)
            entries[record.id] = _Entry(record.digest, principal, record)
        return entries


def _news(before: Mapping[str, _Entry], now: Mapping[str, _Entry]) -> TokenNews:
    return TokenNews(
        added=tuple(sorted(now.keys() - before.keys())),
        changed=tuple(sorted(token_id for token_id in now.keys() & before.keys() if now[token_id] != before[token_id])),
        removed=tuple(sorted(before.keys() - now.keys())),
    )
