"""Names of sessions and of paths in them on the command line: SESSION or SESSION:PATH, with the beginning of an id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from executor_client._core.session_base import begins
from executor_client.client import ExecutorClient
from executor_client.errors import InvalidRequest, NotFoundError
from executor_client.session import Session

_LOCATED = re.compile(r"([A-Za-z0-9_-]{1,64}):(.*)", re.DOTALL)


@dataclass(frozen=True)
class Located:
    """A path in the workspace of a session."""

    session: str
    path: str


def located(text: str) -> Located | None:
    """Parses SESSION:PATH; returns None for anything else, which is a local path."""
    found = _LOCATED.fullmatch(text)
    return Located(found[1], found[2]) if found else None


def matching_id(ids: Sequence[str], prefix: str) -> str:
    """Returns the one id that equals the prefix or starts with it. Raises NotFoundError, InvalidRequest."""
    matching = [prefix] if prefix in ids else [each for each in ids if begins(each, prefix)]
    if not matching:
        raise NotFoundError(f"there is no session {prefix!r}; `executor ps` lists those there are")
    if len(matching) > 1:
        raise InvalidRequest(f"{prefix!r} begins the ids of {len(matching)} sessions; use more of it")
    return matching[0]


def find_session(client: ExecutorClient, prefix: str) -> Session:
    """Returns the caller's session whose id starts with the prefix. Raises NotFoundError, InvalidRequest."""
    ids = [info.session_id for info in client.list_sessions()]
    return client.get_session(matching_id(ids, prefix))
