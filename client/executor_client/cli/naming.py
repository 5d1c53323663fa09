"""Sessions, their processes and their paths as the command line names them: SESSION, PROCESS, SESSION:PATH.

SESSION is a name, an id, or the beginning of an id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from executor_client._core.session_base import begins, short_id
from executor_client._core.suggest import nearest, unknown_name
from executor_client.client import ExecutorClient
from executor_client.errors import InvalidRequest, NotFoundError
from executor_client.process_results import ProcessInfo
from executor_client.results import SessionInfo
from executor_client.session import Session

_LOCATED = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,63}):(.*)", re.DOTALL)
_ID_DIGITS = 12
_SUGGESTED_MAX = 5


@dataclass(frozen=True)
class Located:
    """A path in the workspace of a session."""

    session: str
    path: str


def located(text: str) -> Located | None:
    """Parses SESSION:PATH; returns None for anything else, which is a local path."""
    found = _LOCATED.fullmatch(text)
    return Located(found[1], found[2]) if found else None


def matching_id(names: Mapping[str, str], text: str) -> str:
    """Returns the id of the one session that the text means: its id, its name, or the beginning of its id.

    `names` maps the ids of all sessions to their names, which may be empty. Raises NotFoundError, which suggests what
    was meant, and InvalidRequest.
    """
    if text in names:
        return text
    named = [session_id for session_id, name in names.items() if name and name == text]
    matching = named or [session_id for session_id in names if text and begins(session_id, text)]
    if not matching:
        raise NotFoundError(f"there is no session {text!r}; {_suggestion(names, text)}")
    if len(matching) > 1:
        raise InvalidRequest(f"{text!r} begins the ids of {len(matching)} sessions; use more of it")
    return matching[0]


def _suggestion(names: Mapping[str, str], text: str) -> str:
    offered = [name or short_id(session_id, _ID_DIGITS) for session_id, name in names.items()]
    if not offered:
        return "there are none now"
    if nearest(text, offered) is not None or len(offered) <= _SUGGESTED_MAX:
        return unknown_name(text, offered)
    return f"`executor ps` lists the {len(offered)} there are"


def names_of(infos: Iterable[SessionInfo]) -> dict[str, str]:
    """Returns what `matching_id` takes."""
    return {info.session_id: info.name for info in infos}


def find_session(client: ExecutorClient, text: str) -> Session:
    """Returns the caller's session that the text means. Raises NotFoundError, InvalidRequest."""
    return client.get_session(matching_id(names_of(client.list_sessions()), text))


def matching_process(infos: Sequence[ProcessInfo], text: str | None) -> ProcessInfo:
    """Returns the one process whose id equals the text or begins with it.

    Without a text: the only one that runs, or the only one of them that has a terminal. Raises NotFoundError,
    InvalidRequest.
    """
    running = [info for info in infos if info.running]
    if text is None:
        matching = running if len(running) == 1 else [info for info in running if info.has_pty]
    else:
        matching = [info for info in infos if info.process_id == text]
        matching = matching or [info for info in infos if text and info.process_id.startswith(text)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(info.process_id[:_ID_DIGITS] for info in running[:_SUGGESTED_MAX])
    there_are = f"those that run are {listed}" if running else "none runs now"
    if text is None and running:
        raise InvalidRequest(f"{len(running)} processes run in this session; name one: {listed}")
    if matching:
        raise InvalidRequest(f"{text!r} begins the ids of {len(matching)} processes; use more of it")
    missing = "there is no process to attach to" if text is None else f"there is no process {text!r} in this session"
    raise NotFoundError(f"{missing}; {there_are}")
