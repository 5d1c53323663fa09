"""The secrets for outgoing requests: read from files that the daemon opened, kept in this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

MAX_SECRET_BYTES = 2**14
_PLACEHOLDER = re.compile(r"\$\{([A-Za-z0-9][A-Za-z0-9._-]{0,63})\}")
# A field value of RFC 9110, in ASCII: printable, with spaces inside only. Tabs are allowed there, but are more often a
# mistake.
_SECRET = re.compile(rb"[!-~]+(?: +[!-~]+)*")


class BadSecret(Exception):
    """The content of a secret's file is unusable; the message is a clause with the reason, without the content."""


class SecretMissing(Exception):
    """A header needs a missing secret. The message is the secret's name."""


def read_secret(descriptor: int) -> str:
    """Reads a secret from an open file, and closes it. Drops a final line break. Raises BadSecret."""
    try:
        content = os.pread(descriptor, MAX_SECRET_BYTES + 1, 0)
    except OSError as error:
        raise BadSecret(f"can't be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(content) > MAX_SECRET_BYTES:
        raise BadSecret(f"is larger than {MAX_SECRET_BYTES:,} bytes")
    secret = content.removesuffix(b"\n").removesuffix(b"\r")
    if not secret:
        raise BadSecret("is empty; write the secret into it, as one line")
    if b"\n" in secret or b"\r" in secret:
        raise BadSecret("has more than one line; a header has one")
    if _SECRET.fullmatch(secret) is None:
        raise BadSecret("must hold one line of printable ASCII without control characters, or spaces at its ends")
    return secret.decode("ascii")


class Secrets:
    """Fills the placeholders of headers. Its representation has names only."""

    def __init__(self) -> None:
        self._values: Mapping[str, str] = {}

    def replace(self, values: Mapping[str, str]) -> None:
        self._values = dict(values)

    def fill(self, template: str) -> bytes:
        """Returns a header's value with each `${name}` replaced. Raises SecretMissing."""

        def value_of(match: re.Match[str]) -> str:
            try:
                return self._values[match[1]]
            except KeyError:
                raise SecretMissing(match[1]) from None

        return _PLACEHOLDER.sub(value_of, template).encode("ascii")

    def __repr__(self) -> str:
        return f"Secrets({', '.join(sorted(self._values))})"
