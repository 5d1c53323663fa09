"""The tokens that are in force: whose token is this?

`Tokens` holds what the file said when it was last good. A look-up takes the same way for every wrong token: the entry
of its id, or one that stands for no entry, then a comparison of digests in constant time, then whether it still holds.
Nothing it answers says which of these failed.

A file that has become unreadable, malformed or readable by others changes nothing: the tokens before it stay in force,
and the log says so, loudly and once. A file that is gone is no tokens.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from executor_server.model import Principal
from executor_server.token_file import FileVersion, TokenFile, TokenFileError, TokenRecord, digest_of, parse_token

LOCAL_PRINCIPAL = Principal(tenant="local", name="token", is_admin=True)
"""Who has the token in the state directory: the user who runs the daemon."""

_LOCAL_ID = ""  # no token of the file has it

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _Entry:
    digest: str
    principal: Principal
    record: TokenRecord | None  # None holds for ever

    def is_valid(self, now: datetime) -> bool:
        return self.record is None or self.record.is_valid(now)


@dataclass(frozen=True)
class TokenNews:
    """What has become of the tokens: ids of those that came, went, or say something else; or why none of it did."""

    in_force: int
    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    problem: str = ""


# What no secret has as its digest, so that an unknown id is compared with something too.
_NO_ENTRY = _Entry("0" * 64, Principal(tenant="", name=""), None)


class Tokens:
    """Every token that the daemon accepts."""

    def __init__(
        self,
        local_token: str,
        file: TokenFile | None = None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Reads the file. Raises TokenFileError."""
        self._local = _Entry(digest_of(local_token), LOCAL_PRINCIPAL, None)
        self._file = file
        self._now = now
        self._entries = {_LOCAL_ID: self._local}
        self._tenants: Set[str] = frozenset({self._local.principal.tenant})
        self._seen: FileVersion | None = None  # None: to be read, whatever it is
        self._turn = asyncio.Lock()  # of readings: one that began earlier must not have the last word
        self._told = ""
        self._listeners: list[Callable[[TokenNews], None]] = []
        if file is not None:
            self._seen = file.version()
            self._take(self._read())

    def id_of(self, token: str) -> str | None:
        """The id of a token that is accepted; None for every other text."""
        token_id, secret = parse_token(token) or (_LOCAL_ID, token)
        entry = self._entries.get(token_id, _NO_ENTRY)
        matches = hmac.compare_digest(digest_of(secret), entry.digest)
        valid = entry.is_valid(self._now())
        return token_id if matches and valid and entry is not _NO_ENTRY else None

    @property
    def tenants(self) -> Set[str]:
        """Those that have had a token which held when the tokens were read."""
        return self._tenants

    def principal_of_id(self, token_id: str) -> Principal | None:
        """Whose token that is, while it holds."""
        entry = self._entries.get(token_id)
        return entry.principal if entry is not None and entry.is_valid(self._now()) else None

    def listen(self, told: Callable[[TokenNews], None]) -> None:
        """Has this told whatever becomes of the tokens from here on."""
        self._listeners.append(told)

    async def refresh(self) -> None:
        """Reads the file if it has changed; one that can't be used is told to the log."""
        try:
            if self._file is not None and self._file.version() != self._seen:
                await self.reload()
        except TokenFileError as error:
            if str(error) != self._told:
                self._told = str(error)
                _log.error("token_file_refused", problem=self._told, tokens_in_force=len(self._entries) - 1)
                self._tell(TokenNews(len(self._entries) - 1, problem=self._told))

    async def reload(self) -> bool:
        """Reads the file; whether other tokens are in force now. Raises TokenFileError, and then changes nothing."""
        if self._file is None:
            return False
        async with self._turn:
            # Before the reading: what is written meanwhile is another version, and read the next time.
            self._seen = self._file.version()
            before = self._entries
            try:
                self._take(await asyncio.to_thread(self._read))  # a large file takes a while to parse
            except asyncio.CancelledError:
                self._seen = None  # who asked for it has gone in the middle: what is new has not been seen
                raise
            self._told = ""
            if self._entries == before:
                return False
            _log.info("tokens_changed", tokens_in_force=len(self._entries) - 1)
            self._tell(_news(before, self._entries))
            return True

    def _tell(self, news: TokenNews) -> None:
        for told in self._listeners:
            told(news)

    def _take(self, entries: dict[str, _Entry]) -> None:
        now = self._now()
        self._entries = entries
        self._tenants = frozenset(entry.principal.tenant for entry in entries.values() if entry.is_valid(now))

    def _read(self) -> dict[str, _Entry]:
        assert self._file is not None
        entries = {_LOCAL_ID: self._local}
        for record in self._file.read():
            principal = Principal(record.tenant, f"token:{record.name}:{record.id}", record.admin)
            entries[record.id] = _Entry(record.digest, principal, record)
        return entries


def _news(before: Mapping[str, _Entry], now: Mapping[str, _Entry]) -> TokenNews:
    return TokenNews(
        in_force=len(now) - 1,
        added=tuple(sorted(now.keys() - before.keys())),
        changed=tuple(sorted(token_id for token_id in now.keys() & before.keys() if now[token_id] != before[token_id])),
        removed=tuple(sorted(before.keys() - now.keys())),
    )
