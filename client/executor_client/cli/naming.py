"""Finds sessions, processes and paths by their names on the command line: SESSION, PROCESS, SESSION:PATH.

SESSION is a name, an id, or the beginning of an id.
"""

from __future__ import annotations

import argparse
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
_OPTIONS = {"limits": "--limit", "packages": "--with", "node_labels": "--node-label"}


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
    """Returns the id of the session with this id, name, or beginning of an id.

    `names` maps the ids of all sessions to their names, which may be empty. Raises NotFoundError, with a suggestion,
    and InvalidRequest.
    """
    if text in names:
        return text
    named = [session_id for session_id, name in names.items() if name and name == text]
    matching = named or [session_id for session_id in names if text and begins(session_id, text)]
    if not matching:
        raise NotFoundError(f"there is no session {text!r}; {_suggestion(names, text)}")
    if len(matching) > 1:
        raise InvalidRequest(f"{text!r} matches {len(matching)} sessions; use more digits")
    return matching[0]


def _suggestion(names: Mapping[str, str], text: str) -> str:
    offered = [name or short_id(session_id, _ID_DIGITS) for session_id, name in names.items()]
    if not offered:
        return "you have no sessions"
    if nearest(text, offered) is not None or len(offered) <= _SUGGESTED_MAX:
        return unknown_name(text, offered)
    return f"`executor ps` lists your {len(offered)} sessions"


def names_of(infos: Iterable[SessionInfo]) -> dict[str, str]:
    """Returns the argument of `matching_id`."""
    return {info.session_id: info.name for info in infos}


def find_session(client: ExecutorClient, text: str) -> Session:
    """Returns the caller's session by its id, name, or beginning of the id. Raises NotFoundError, InvalidRequest."""
    return client.get_session(matching_id(names_of(client.list_sessions()), text))


def refuse_for_existing(options: argparse.Namespace, **more: object) -> None:
    """Raises InvalidRequest for options of a new session in a command that names an existing one.

    `more` has the values of further options by their names.
    """
    names = ("name", "image", "limits", "network", "packages", "node_labels", "state")
    given = {name: getattr(options, name, None) for name in names} | more
    if clashing := [_OPTIONS.get(name, f"--{name}") for name, value in given.items() if value]:
        raise InvalidRequest(f"{' and '.join(clashing)}: not possible for an existing session, which has its own")


def matching_process(infos: Sequence[ProcessInfo], text: str | None) -> ProcessInfo:
    """Returns the process whose id equals the text or begins with it.

    Without a text: the only running process, or the only one with a terminal. Raises NotFoundError, InvalidRequest.
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
    there_are = f"running: {listed}" if running else "none is running"
    if text is None and running:
        raise InvalidRequest(f"{len(running)} processes are running in this session; name one: {listed}")
    if matching:
        raise InvalidRequest(f"{text!r} matches {len(matching)} processes; use more digits")
    missing = "there is no process to attach to" if text is None else f"there is no process {text!r} in this session"
    raise NotFoundError(f"{missing}; {there_are}")
