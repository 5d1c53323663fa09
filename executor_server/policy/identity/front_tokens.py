"""The tokens of a fleet, which its front hands to its nodes: those of the file, and the front's own.

A client that shows a token to the front shows the same one to a node. So the token in the front's state directory, with
which the user who runs the front calls it, has a record like those in the file, and nodes know it too.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from executor_server.core.config import StateDirError
from executor_server.policy.identity.token_file import (
    FileVersion,
    TokenFile,
    TokenRecord,
    digest_of,
    dumped,
    parse_token,
)
from executor_server.policy.identity.tokens import LOCAL_PRINCIPAL


class FrontTokens:
    """The records of the file with one more, for `Tokens`."""

    def __init__(self, file: TokenFile, own_token: str, path: Path) -> None:
        """`path`: where the front's own token is. Raises StateDirError when it has no record's form."""
        parts = parse_token(own_token)
        if parts is None:
            raise StateDirError(
                f"The token in {path} is that of a daemon without a fleet; remove the file, and one that nodes can "
                "know is made."
            )
        self._file = file
        self._own = TokenRecord(
            id=parts[0],
            tenant=LOCAL_PRINCIPAL.tenant,
            name="front",
            digest=digest_of(parts[1]),
            # The file has one, so the same token makes the same record at each start.
            create_time=datetime.fromtimestamp(int(path.stat().st_mtime), UTC),
            admin=LOCAL_PRINCIPAL.is_admin,
        )
        self._records: tuple[TokenRecord, ...] = (self._own,)  # the last that were read

    def version(self) -> FileVersion | None:
        """Raises TokenFileError."""
        return self._file.version()

    def read(self) -> tuple[TokenRecord, ...]:
        """Raises TokenFileError."""
        self._records = (*(record for record in self._file.read() if record.id != self._own.id), self._own)
        return self._records

    def content(self) -> bytes:
        """Returns the content of a file with the records of the last reading."""
        return dumped(self._records)
