"""The guest's configuration, and the programs of its children.

Values only: main.py makes them from the command line, and all parts of the supervisor read them.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..wire.lean import socket


_CHECKER_MEMORY_BYTES = 1024 * 1024 * 1024


class Config:
    """The configuration that the guest gets at its start. It has only a hash of the channel's token."""

    __slots__ = (
        "cpu_counter",
        "egress_listener",
        "has_environment",
        "mark",
        "memory_bytes",
        "orphan_time_s",
        "preload",
        "processes",
        "token_hash",
        "variables",
        "watch_memory",
        "workspace",
    )

    def __init__(
        self,
        token_hash: str,
        workspace: str,
        orphan_time_s: float,
        memory_bytes: int,
        processes: int,
        watch_memory: bool,
        preload: list[str],
        mark: str,
        cpu_counter: Optional[int] = None,
        egress_listener: Optional[int] = None,
        has_environment: bool = False,
    ) -> None:
        self.token_hash = token_hash
        self.workspace = workspace
        self.orphan_time_s = orphan_time_s
        self.memory_bytes = memory_bytes
        self.processes = processes
        self.watch_memory = watch_memory
        self.preload = preload  # modules that an interpreter imports before it is used
        self.cpu_counter = cpu_counter  # an open file of the sandbox's control group, if it has one
        self.egress_listener = egress_listener  # the descriptor of the egress proxy's listener, if it has one
        self.has_environment = has_environment  # packages are at ENVIRONMENT_PATH
        self.variables: dict[str, str] = {}  # the session's environment variables, once it has sent them
        self.mark = mark  # random; the checker puts it into code objects, where the interpreter replaces it

    @property
    def checker_memory_bytes(self) -> int:
        return min(_CHECKER_MEMORY_BYTES, self.memory_bytes // 2)


class Programs:
    """The children's programs, which get their end of the link. `load` imports their modules into the supervisor."""

    __slots__ = ("checker", "interpreter", "load")

    def __init__(
        self,
        load: Callable[[], None],
        interpreter: Callable[[socket.socket, Config, list[str]], None],
        checker: Callable[[socket.socket, Config], None],
    ) -> None:
        self.load = load
        self.interpreter = interpreter
        self.checker = checker
