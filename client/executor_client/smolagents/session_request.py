"""The arguments for an executor's sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from executor_client import ExecutorClient, Session
from executor_client.smolagents.files import StartFile

# Names that smolagents' local executor offers without an import, and that are not builtins of CPython.
PRELUDE = """\
from math import acos, asin, atan, atan2, ceil, cos, degrees, exp, floor, log, radians, sin, sqrt, tan
"""


@dataclass(frozen=True)
class SessionRequest:
    """The arguments for each new session."""

    image: str | None
    authorized_imports: tuple[str, ...]
    limits: Mapping[str, Any]
    prelude: str = ""
    """Runs right after `PRELUDE`, in each interpreter."""
    backend: str | None = None
    network: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    labels: Mapping[str, str] | None = None
    node_labels: Mapping[str, str] | None = None
    state: bytes | None = None
    files: tuple[StartFile, ...] = ()
    """The initial files of each session's workspace."""

    def make(self, client: ExecutorClient, modules: Iterable[str] = (), name: str | None = None) -> Session:
        """Creates a session; `modules` are needed by its tools. A session with a name outlives the client.

        Raises PreconditionError (NAME_TAKEN) if another session has the name.
        """
        own = self.own_modules
        with ExitStack() as on_failure:
            session = on_failure.enter_context(
                client.create_session(
                    image=self.image,
                    authorized_imports=[each for each in self.authorized_imports if each not in own],
                    limits=self.limits or None,
                    labels=self.labels,
                    prelude=PRELUDE + self.prelude,
                    backend=self.backend,
                    network=self.network,
                    packages=self.packages,
                    env=self.env,
                    modules=modules,
                    node_labels=self.node_labels,
                    state=self.state,
                    name=name,
                    detached=name is not None,
                )
            )
            for file in self.files:
                file.put(session)
            if own and not session.info.workspace_imports:
                session.authorize_imports(own)
            on_failure.pop_all()
        return session

    @property
    def own_modules(self) -> tuple[str, ...]:
        """The authorized imports that `files` contain. The daemon must not look for them in the image or packages."""
        brought = set(map(module_of, (file.path for file in self.files)))
        return tuple(each for each in self.authorized_imports if each.partition(".")[0] in brought)

    def saved(self) -> dict[str, Any]:
        """Returns the arguments to save with an agent, as JSON values, without those of this process."""
        saved: dict[str, Any] = {}
        for name in ("image", "backend", "limits", "labels", "node_labels", "prelude"):
            if value := getattr(self, name):
                saved[name] = dict(value) if isinstance(value, Mapping) else value
        if self.packages:
            saved["packages"] = list(self.packages)
        return saved


def module_of(path: str) -> str:
    """Returns the module name of this file of a workspace, or of its package."""
    return path.split("/", 1)[0].removesuffix(".py")


def beginnings_of(request: SessionRequest) -> list[str]:
    """Returns the names of the given arguments that only apply to a new session."""
    names = ("image", "limits", "prelude", "backend", "network", "packages", "env", "labels", "node_labels", "state")
    return [name for name in (*names, "files") if getattr(request, name)]


def refuse_beginnings(request: SessionRequest) -> None:
    """Raises ValueError for arguments of a new session combined with `session=`."""
    if given := beginnings_of(request):
        raise ValueError(f"session= uses an existing session, but {', '.join(given)} only applies to a new one")


def check_access(client: ExecutorClient | None, session: Session | str | None, access: tuple[Any, ...]) -> None:
    """Raises ValueError if the daemon is specified twice."""
    if client is not None and any(each is not None for each in access):
        raise ValueError("client already has address, token, tls and on_approval: pass either them or client")
    if isinstance(session, Session) and any(each is not None for each in (client, *access)):
        raise ValueError("session already has a client: do not pass client, address, token, tls or on_approval with it")
