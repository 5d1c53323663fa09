"""An audit hook that holds agent code, and libraries that act for it, to the rules on files and processes.

CPython calls the hook for each such operation, however the program reaches it. A call costs a little, so the hook is
added when a rule first needs it. It can't be removed again; new rules give it new handlers.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

from ..checks.language import PolicyDenied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Callable, Iterator, Optional

    from ..checks.rules import RuleEnforcer

    Handler = Callable[[tuple[Any, ...], Optional[FrameType]], None]

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STARTS = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("pty.spawn", "subprocess.Popen"),
)
# Modules that open a file for their caller.
_OPENERS = frozenset(
    (
        *("bz2", "codecs", "fileinput", "gzip", "io", "lzma", "os", "_pyio", "pathlib", "pathlib._abc"),
        *("pathlib._local", "shutil", "tarfile", "tempfile", "zipfile", "zipfile._path"),
    )
)
_realpath, _getcwd, _fsdecode, _join = os.path.realpath, os.getcwd, os.fsdecode, os.path.join


class Audit:
    """Holds one interpreter to the rules on files and processes."""

    def __init__(self, agent_builtins: dict[str, Any], enforcer: RuleEnforcer, workspace: str) -> None:
        self._agent_builtins = agent_builtins
        self._enforcer = enforcer
        self._inside = f"{workspace.rstrip('/')}/"
        self._handlers: dict[str, Handler] = {}
        self._added = False

    def on_rules(self) -> None:
        """Installs the handlers that the rules in force need."""
        refused = self._enforcer.rules.refused
        handlers: dict[str, Handler] = {}
        if "dangerous_functions" in refused:
            handlers.update({event: self._starter(event) for event in _STARTS})
            handlers["ctypes.dlopen"] = self._on_load
        if refused & {"open", "file_writing"}:
            handlers["open"] = self._on_open
        self._handlers = handlers
        if handlers and not self._added:
            self._added = True
            self._add()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Handles nothing in this context, for operations of the guest itself."""
        handlers, self._handlers = self._handlers, {}
        try:
            yield
        finally:
            self._handlers = handlers

    def _add(self) -> None:
        getframe = sys._getframe

        def hook(event: str, args: tuple[Any, ...]) -> None:
            handler = self._handlers.get(event)
            if handler is not None:
                handler(args, getframe(1))

        sys.addaudithook(hook)

    # -- processes

    def _starter(self, event: str) -> Handler:
        def on_start(args: tuple[Any, ...], frame: Optional[FrameType]) -> None:
            if not self._is_import(frame):
                self._enforcer.refuse(PolicyDenied("dangerous_functions", f"Function {event}"))

        return on_start

    def _is_import(self, frame: Optional[FrameType]) -> bool:
        """True when a library does it while it is being imported."""
        while frame is not None and not self._is_agents(frame):
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False

    def _on_load(self, args: tuple[Any, ...], frame: Optional[FrameType]) -> None:
        """Does not let agent code load a shared library. Libraries may."""
        while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "ctypes":
            frame = frame.f_back
        if frame is not None and self._is_agents(frame):
            self._enforcer.refuse(PolicyDenied("dangerous_functions", "Function ctypes.dlopen"))

    # -- files

    def _on_open(self, args: tuple[Any, ...], frame: Optional[FrameType]) -> None:
        path, mode, flags = args
        if isinstance(path, int):
            return  # a descriptor, which is open already
        refused = self._enforcer.rules.refused
        if "open" in refused and mode is not None and frame is not None and self._is_agents(frame):
            self._enforcer.refuse(PolicyDenied("open", "Function io.open"))
        if "file_writing" not in refused or not flags & _WRITING or path in (os.devnull, os.devnull.encode()):
            return
        while frame is not None and frame.f_globals.get("__name__") in _OPENERS and not self._is_agents(frame):
            frame = frame.f_back
        if (frame is not None and self._is_agents(frame)) or self._is_inside(path):
            self._enforcer.refuse(PolicyDenied("file_writing", f"Opening {_fsdecode(path)!r} for writing"))

    def _is_inside(self, path: Any) -> bool:
        return _realpath(_join(_getcwd(), _fsdecode(path))).startswith(self._inside)

    def _is_agents(self, frame: FrameType) -> bool:
        return frame.f_builtins is self._agent_builtins
