"""The rules that a guest gets for its session: limits of executions, imports, language features, tools.

They are part of the schema in messages.py: a change is a change of the protocol.
"""

from __future__ import annotations

from .schema import Record, boolean, integer, number, record, texts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

LANGUAGE_RULES_MAX = 32  # more than there are, because raising it is a change of the protocol
LISTED_HOSTS_MAX = 16


class ExecutionMax(Record):
    """The highest limits of one execution of the session."""

    wall_time_s: float = number(0.001)
    cpu_time_s: float = number(0.001)
    operations: int = integer(1)
    output_bytes: int = integer(2)


class CodeRules(Record):
    """The imports that agent code may make, the language features that it may not use, the hosts that it may reach.

    The guest only mentions the hosts in messages; the egress proxy enforces them. If there are many, the last text
    counts the rest. With `workspace` the program's own modules need no authorization.
    """

    authorized: list[str] = texts(2048, 256)
    denied: list[str] = texts(2048, 256)
    refused: list[str] = texts(LANGUAGE_RULES_MAX, 64)
    network: Optional[list[str]] = texts(LISTED_HOSTS_MAX + 1, 300, default=None)
    workspace: bool = boolean(default=False)


class SessionRules(CodeRules):
    """The rules for each execution of a session, and for all together."""

    session_operations: int = integer(1)
    execution_max: Optional[ExecutionMax] = record(ExecutionMax, default=None)
    shipped_tools: list[str] = texts(1024, 256)
