"""The file of the tenants' tokens: its format, and how it is read and changed.

It is a JSON list with an entry for each token ever made. It holds no secret, only the SHA-256 digest of each. A slow
hash would add nothing, since it protects secrets that can be guessed, and these have 112 random bits or more. It would
also slow down every call of every client.

A user who can write the file can make tokens, so it is used only when no user but its owner and root could have written
it. Writers hold a lock and replace the file atomically; a reader sees either the old file or the new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, AwareDatetime, Field, TypeAdapter, ValidationError

from executor_server.core.config import Name, Section, StateDirError, each_once
from executor_server.policy.identity.roles import Role

MAX_TOKEN_FILE_BYTES = 16 * 1024 * 1024
SECRET_BYTES = 32

_ID_CHARS = 12
_ID_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without characters that look alike
_TOKEN = re.compile(rf"ret_([a-z0-9]{{{_ID_CHARS}}})_([A-Za-z0-9_-]{{43}})")
# The form of key that E2B's SDK accepts: 40 hexadecimal digits; the last 28 are the secret's 112 random bits.
_E2B_TOKEN = re.compile(rf"e2b_([0-9a-f]{{{_ID_CHARS}}})([0-9a-f]{{28}})")
_HEX = "0123456789abcdef"

TokenForm = Literal["ret", "e2b"]


class TokenFileError(StateDirError):
    """The file of tokens can't be used; the message is a sentence that says why and what to do."""


class TokenRecord(Section):
    """An entry of the file."""

    id: Annotated[str, Field(pattern=rf"^[a-z0-9]{{{_ID_CHARS}}}$")]
    tenant: Name
    name: Name
    digest: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    create_time: AwareDatetime
    expire_time: AwareDatetime | None = None
    revoke_time: AwareDatetime | None = None
    admin: Annotated[bool, Field(strict=True)] = False
    roles: Annotated[tuple[Role, ...], AfterValidator(each_once)] = ()

    def is_valid(self, now: datetime) -> bool:
        return self.revoke_time is None and (self.expire_time is None or now < self.expire_time)


_RECORDS = TypeAdapter(tuple[TokenRecord, ...])


@dataclass(frozen=True)
class FileVersion:
    """Changes whenever the file is replaced or written, or its rights or its directory's rights change."""

    directory_user: int
    directory_mode: int
    inode: int
    size_bytes: int
    modify_time_ns: int
    change_time_ns: int


def parse_token(token: str) -> tuple[str, str] | None:
    """Returns the id and the secret of a token; None when its form is wrong."""
    match = _TOKEN.fullmatch(token) or _E2B_TOKEN.fullmatch(token)
    return (match[1], match[2]) if match is not None else None


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


def make_token() -> str:
    """Returns a token that is in no file yet, of the form that a record can describe."""
    return f"ret_{_random_id()}_{secrets.token_urlsafe(SECRET_BYTES)}"


def dumped(records: Sequence[TokenRecord]) -> bytes:
    """Returns the content of a file with these records."""
    return _RECORDS.dump_json(tuple(records), indent=1) + b"\n"


class TokenFile:
    """The file at one path; a missing file stands for no tokens."""

    def __init__(self, path: Path) -> None:
        self.path = path

    # -- reading

    def version(self) -> FileVersion | None:
        """Returns the version of the file; None when it is missing. Raises TokenFileError."""
        try:
            found, directory = self.path.lstat(), self.path.parent.stat()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TokenFileError(f"The token file {self.path} can't be read: {error.strerror}.") from error
        rights = directory.st_uid, directory.st_mode
        return FileVersion(*rights, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)

    def read(self) -> tuple[TokenRecord, ...]:
        """Returns every entry, revoked and expired ones included. Raises TokenFileError."""
        try:
            # O_NONBLOCK: opening a named pipe in its place must not hang the daemon.
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._check_rights(os.fstat(fd))
                with os.fdopen(fd, "rb", closefd=False) as file:
                    data = file.read(MAX_TOKEN_FILE_BYTES + 1)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return ()
        except OSError as error:
            why = "it is a symbolic link" if self.path.is_symlink() else error.strerror
            raise TokenFileError(f"The token file {self.path} can't be read: {why}.") from error
        if len(data) > MAX_TOKEN_FILE_BYTES:
            raise TokenFileError(f"The token file {self.path} is larger than {MAX_TOKEN_FILE_BYTES:,} bytes.")
        return self._parsed(data)

    def _check_rights(self, found: os.stat_result) -> None:
        """Checks the open file, so that it can't be exchanged between the check and the reading."""
        where = f"The token file {self.path}"
        if not stat.S_ISREG(found.st_mode):
            raise TokenFileError(f"{where} is not a regular file.")
        if found.st_uid not in (os.geteuid(), 0):
            raise TokenFileError(f"{where} belongs to user {found.st_uid}, not to this one or to root.")
        if found.st_mode & 0o077:
            raise TokenFileError(f"{where} can be read or written by other users; run: chmod 600 {self.path}")
        directory = self.path.parent.stat()
        if directory.st_uid not in (os.geteuid(), 0):  # even where it is sticky
            raise TokenFileError(
                f"{where} is in a directory of user {directory.st_uid}, who could replace it; move it to a directory "
                "of this user or of root."
            )
        if directory.st_mode & 0o022 and not directory.st_mode & stat.S_ISVTX:
            raise TokenFileError(
                f"{where} is in a directory that other users can write, so they could replace it; run: "
                f"chmod go-w {self.path.parent}"
            )

    def _parsed(self, data: bytes) -> tuple[TokenRecord, ...]:
        try:
            records = _RECORDS.validate_json(data)
        except ValidationError as error:
            # The value is left out: it may be a token, written by mistake where its digest belongs.
            first = error.errors(include_input=False, include_url=False)[0]
            field = ".".join(str(part) for part in first["loc"])
            raise TokenFileError(
                f"The token file {self.path} is not what `executor-server token` writes: "
                f"{field + ': ' if field else ''}{first['msg']}."
            ) from error
        if len({record.id for record in records}) != len(records):
            raise TokenFileError(f"The token file {self.path} has two tokens with one id.")
        return records

    # -- changing

    def new(
        self,
        tenant: str,
        name: str,
        *,
        expire_time: datetime | None = None,
        admin: bool = False,
        roles: Sequence[Role] = (),
        form: TokenForm = "ret",
    ) -> tuple[TokenRecord, str]:
        """Makes a token. Returns its entry and the token, which is stored nowhere. Raises TokenFileError."""
        is_e2b = form == "e2b"
        secret = secrets.token_hex(14) if is_e2b else secrets.token_urlsafe(SECRET_BYTES)
        with self._locked():
            records = self.read()
            taken = {record.id for record in records}
            record = TokenRecord(
                id=next(
                    token_id
                    for token_id in iter(lambda: _random_id(_HEX if is_e2b else _ID_ALPHABET), None)
                    if token_id not in taken
                ),
                tenant=tenant,
                name=name,
                digest=digest_of(secret),
                create_time=_now(),
                expire_time=expire_time,
                admin=admin,
                roles=tuple(roles),
            )
            self._write((*records, record))
        return record, f"e2b_{record.id}{secret}" if is_e2b else f"ret_{record.id}_{secret}"

    def revoke(self, token_id: str) -> TokenRecord | None:
        """Revokes a token for good; its entry stays. Returns None when there is none. Raises TokenFileError."""
        with self._locked():
            records = self.read()
            found = next((record for record in records if record.id == token_id), None)
            if found is None or found.revoke_time is not None:
                return found
            revoked = found.model_copy(update={"revoke_time": _now()})
            self._write([revoked if record is found else record for record in records])
            return revoked

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A separate lock file, because the token file itself is replaced: a lock on it would not stop the next writer.
        lock_path = self.path.with_name(self.path.name + ".lock")
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise TokenFileError(f"The token file {self.path} can't be written: {error.strerror}.") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _write(self, records: Sequence[TokenRecord]) -> None:
        data = dumped(records)
        if len(data) > MAX_TOKEN_FILE_BYTES:
            raise TokenFileError(
                f"The token file {self.path} would be larger than {MAX_TOKEN_FILE_BYTES:,} bytes; remove "
                "entries of tokens that are expired or revoked."
            )
        try:
            owner = (self.path if self.path.exists() else self.path.parent).stat()
            fd, name = tempfile.mkstemp(prefix=f".{self.path.name}-", dir=self.path.parent)  # 0600
            try:
                with os.fdopen(fd, "wb") as file:
                    file.write(data)
                    file.flush()
                    if os.geteuid() == 0:
                        os.fchown(fd, owner.st_uid, owner.st_gid)  # the daemon may run as a user of its own
                    os.fsync(fd)
                Path(name).replace(self.path)
            except BaseException:
                Path(name).unlink(missing_ok=True)
                raise
            _sync_directory(self.path.parent)
        except OSError as error:
            raise TokenFileError(f"The token file {self.path} can't be written: {error.strerror}.") from error


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _random_id(alphabet: str = _ID_ALPHABET) -> str:
    return "".join(secrets.choice(alphabet) for _ in range(_ID_CHARS))


def _sync_directory(path: Path) -> None:
    """Makes the new directory entry survive a power failure; the content alone is not enough."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
