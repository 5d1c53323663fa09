"""Requests that the policy leaves to a person (`ask`), as `on_approval` and `watch_approvals` give them."""

from __future__ import annotations

import enum
import json
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, TypeAlias, get_args

from executor_client._core.short_repr import ShortRepr

ApprovalDecision: TypeAlias = Literal["once", "session", "deny"]
"""`session` also approves equal requests of the same session."""
DECISIONS: tuple[str, ...] = get_args(ApprovalDecision)


class ApprovalKind(enum.Enum):
    """What a program or a client requests."""

    HOST = "host"
    PACKAGE = "package"
    TOOL = "tool"
    """A call of a host tool."""
    IMPORT = "import"
    OTHER = "other"
    """Unknown to this client, which is older than the daemon."""


@dataclass(frozen=True)
class Approval(ShortRepr):
    """A request that waits for a decision.

    The program chooses `what`, so it may try to deceive. All texts are printable ASCII of a bounded length; other
    characters are escapes.
    """

    approval_id: str
    kind: ApprovalKind
    what: str
    """A host with its port, a requirement, the name of a tool, or a pattern of imports."""
    detail: str
    """The arguments of a tool, shortened: `"a.txt", mode="w"`. A `...` or `<kind>` outside of quotes marks an omission.
    Empty for other kinds."""
    rule: str
    """The deciding key of the policy, such as "profiles.data.network.ask"."""
    tenant: str
    session_id: str
    """Empty while the session is not created yet."""
    request_id: str
    """Of the request that creates the session; empty after that."""
    execution_id: str
    """Empty if no execution caused it."""
    create_time: datetime
    wait_s: float
    """Seconds from `create_time` until the request is denied."""
    _ends_at_s: float = field(repr=False, compare=False)
    _ended: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    @property
    def left_s(self) -> float:
        """Seconds until the request is denied."""
        return max(0.0, self._ends_at_s - time.monotonic())

    @property
    def is_waiting(self) -> bool:
        """False once it was decided, withdrawn or timed out, as far as the client knows."""
        return not self._ended.is_set() and self.left_s > 0

    @property
    def shown(self) -> str:
        """`what`, and for a host in punycode also the letters it stands for, as escapes:
        `xn--pple-43d.com:443 (stands for \\u0430pple.com:443)`."""
        return shown_host(self.what) if self.kind is ApprovalKind.HOST else self.what

    @property
    def policy_change(self) -> str:
        """The change of the policy that would allow it without an approval, as text for a person."""
        table, _, _ = self.rule.rpartition(".")
        # A session may reach a host in `allowed` only if its client requests that.
        key = "default" if self.kind is ApprovalKind.HOST else "allowed"
        default = ' (default: ["*"])' if self.kind in (ApprovalKind.TOOL, ApprovalKind.IMPORT) else ""
        return f"to allow it always, add {json.dumps(self.what)} to {table}.{key}{default}"

    def __str__(self) -> str:
        """One line: "host pypi.org:443 (profiles.data.network.ask), session 3f2a, 118 s left"."""
        session = f"session {self.session_id}" if self.session_id else "a new session"
        call = f"({self.detail})" if self.kind is ApprovalKind.TOOL else ""
        return f"{self.kind.value} {self.shown}{call} ({self.rule}), {session}, {self.left_s:.0f} s left"


OnApproval = Callable[[Approval], ApprovalDecision | Awaitable[ApprovalDecision]]


def shown_host(host: str) -> str:
    """A host, and if it is in punycode the letters it stands for, as escapes."""
    if "xn--" not in host.lower():
        return host
    return f"{host} (stands for {'.'.join(map(_spelled, host.split('.')))})"


def _spelled(label: str) -> str:
    """Returns a label of a host with punycode decoded, as escapes."""
    if not label.lower().startswith("xn--"):
        return label
    name, colon, port = label.partition(":")
    try:
        letters = name[4:].encode("ascii").decode("punycode")
    except (UnicodeError, ValueError, OverflowError):
        return label
    return letters.encode("unicode_escape").decode("ascii") + colon + port
