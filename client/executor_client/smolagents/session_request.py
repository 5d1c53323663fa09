"""The arguments with which an executor makes its sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from executor_client import ExecutorClient, Session
from executor_client.smolagents.files import StartFile

# Names that smolagents' local executor offers without an import and CPython does not have as builtins.
PRELUDE = """\
from math import acos, asin, atan, atan2, ceil, cos, degrees, exp, floor, log, radians, sin, sqrt, tan
"""


@dataclass(frozen=True)
class SessionRequest:
    """The arguments with which each session is created."""

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
        """Makes a session; `modules` are those that its tools are known to need. One with a name outlives the client.

        Raises PreconditionError (NAME_TAKEN) when another session has the name.
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
        """The authorized imports that `files` bring. The daemon must not look for them in the image, or in packages."""
        brought = set(map(module_of, (file.path for file in self.files)))
        return tuple(each for each in self.authorized_imports if each.partition(".")[0] in brought)

    def saved(self) -> dict[str, Any]:
        """Returns the arguments that a saved agent keeps, as JSON values: none that belong to this process."""
        saved: dict[str, Any] = {}
        for name in ("image", "backend", "limits", "labels", "node_labels", "prelude"):
            if value := getattr(self, name):
                saved[name] = dict(value) if isinstance(value, Mapping) else value
        if self.packages:
            saved["packages"] = list(self.packages)
        return saved


def module_of(path: str) -> str:
    """Returns the name by which code imports this file of a workspace, or the package that it is in."""
    return path.split("/", 1)[0].removesuffix(".py")


def beginnings_of(request: SessionRequest) -> list[str]:
    """Returns the names of the given arguments that only a new session can have."""
    names = ("image", "limits", "prelude", "backend", "network", "packages", "env", "labels", "node_labels", "state")
    return [name for name in (*names, "files") if getattr(request, name)]


def refuse_beginnings(request: SessionRequest) -> None:
    """Raises ValueError for arguments of a new session that are combined with `session=`."""
    if given := beginnings_of(request):
        raise ValueError(f"session= goes on in a session that there is; {', '.join(given)} can be of a new one only")


def check_access(client: ExecutorClient | None, session: Session | str | None, access: tuple[Any, ...]) -> None:
    """Raises ValueError for two ways to one daemon."""
    if client is not None and any(each is not None for each in access):
        raise ValueError("address, token and tls belong to the client: pass either them or client")
    if isinstance(session, Session) and any(each is not None for each in (client, *access)):
        raise ValueError("a session has a client already: pass neither client nor address, token and tls with it")
