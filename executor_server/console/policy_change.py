"""The change of the policy that grants an approved request for good: keys to paste into its file.

`allowed` and `default` replace what they inherit, and an entry of `ask` that is granted anyway is an error. So the keys
are written with the entries that they have now, as far as the text of the policy is known.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.core import is_covered
from executor_server.core.config import dotted, undotted

# A session has a host of `network.allowed` only if its client requests it.
_GRANTING_KEY = {"network": "default", "packages": "allowed", "tools": "allowed", "imports": "allowed"}
_ANY_BY_DEFAULT = {"tools", "imports"}
_PACKAGE_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class PolicyChange:
    """`table` is the table's path, as "profiles.data.network"; `keys` are its new lines."""

    table: str
    keys: tuple[str, ...]
    is_complete: bool
    """False if the entries that the keys have now are not known: they must be kept."""

    @property
    def snippet(self) -> str:
        """TOML."""
        lines = self.keys if self.is_complete else [f"{key}  # and the entries that it has" for key in self.keys]
        return "\n".join((f"[{self.table}]", *lines))


def policy_change(approval: admin_pb.Approval, policy: str = "") -> PolicyChange | None:
    """Returns the change for a request. `policy` is the text of the file; empty if it is not known.

    None: no entry of the policy could name it, since it has characters that the daemon has escaped.
    """
    path = [str(part) for part in undotted(approval.rule)]
    if len(path) != 4 or path[0] != "profiles" or path[2] not in _GRANTING_KEY or "\\" in approval.what:
        return None
    _, profile, subject, _ = path
    key, table = _GRANTING_KEY[subject], dotted((*path[:3],))
    profiles = tomllib.loads(policy).get("profiles", {}) if policy else {}
    if profile not in profiles:
        return PolicyChange(table, (f"{key} = {_array([approval.what])}",), is_complete=False)
    ask = _inherited(profiles, profile, (subject, "ask")) or []
    granted = _inherited(profiles, profile, (subject, key))
    if granted is None:
        granted = ["*"] if subject in _ANY_BY_DEFAULT else []
    now = [each for each in ask if _is_meant(subject, each, [*granted, approval.what])]
    # A package is granted with the bounds that the policy has for it.
    new = now if subject == "packages" and now else [approval.what]
    keys = [f"{key} = {_array(dict.fromkeys((*granted, *new)))}"]
    if now:
        keys.append(f"ask = {_array(each for each in ask if each not in now)}")
    return PolicyChange(table, tuple(keys), is_complete=True)


def _is_meant(subject: str, entry: str, granted: Sequence[str]) -> bool:
    """True if the last one of `granted` leaves an entry of `ask` nothing to ask for."""
    if subject == "packages":
        return entry != "*" and _package(entry) == _package(granted[-1])
    if subject == "imports":
        return is_covered(entry, granted[-1:])
    return entry in granted or {f"{entry}:443", f"{entry}:80"}.issubset(granted)


def _package(requirement: str) -> str:
    name = _PACKAGE_NAME.match(requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name is not None else requirement


def _inherited(profiles: Mapping[str, Any], name: str, path: Sequence[str]) -> list[str] | None:
    """Returns a list that a profile has or inherits; None if none has it. The policy is valid, so it has no cycle."""
    while (profile := profiles.get(name)) is not None:
        value: Any = profile
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        if isinstance(value, list):
            return value
        name = profile.get("extends", "")
    return None


def _array(entries: Any) -> str:
    return json.dumps(list(entries), ensure_ascii=False)
