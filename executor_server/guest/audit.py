"""What the interpreter itself reports when agent code, or a library on its behalf, opens files or starts processes.

An audit hook sees an operation however the program came to it. It costs a little at each, so it is added when a rule
first needs it; it can't be taken away then, and knows the rules of now.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

from .language import PolicyDenied

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType
    from typing import Any, Callable, Iterator, Optional

    from .referee import Referee

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STARTS = (
    *("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn"),
    *("pty.spawn", "subprocess.Popen"),
)
# Modules that open a file for whoever calls them.
_OPENERS = frozenset(
    (
        *("bz2", "codecs", "fileinput", "gzip", "io", "lzma", "os", "_pyio", "pathlib", "pathlib._abc"),
        *("pathlib._local", "shutil", "tarfile", "tempfile", "zipfile", "zipfile._path"),
    )
)
_realpath, _getcwd, _fsdecode, _join = os.path.realpath, os.getcwd, os.fsdecode, os.path.join


class Audit:
    """Holds one interpreter to the rules on files and processes."""

    def __init__(self, agent_builtins: dict[str, Any], referee: Referee, workspace: str) -> None:
        self._agent_builtins = agent_builtins
        self._referee = referee
        self._inside = f"{workspace.rstrip('/')}/"
        self._handlers: dict[str, Callable[[tuple[Any, ...], Optional[FrameType]], None]] = {}
        self._added = False

    def on_rules(self) -> None:
        """Other rules are in force."""
        refused = self._referee.rules.refused
        handlers: dict[str, Callable[[tuple[Any, ...], Optional[FrameType]], None]] = {}
        if "dangerous_functions" in refused:
            handlers.update({event: self._starter(event) for event in _STARTS})
            handlers["ctypes.dlopen"] = self._on_load
        if refused & {"open", "file_writing"}:
            handlers["open"] = self._on_open
        if "file_writing" in refused:
            sys.dont_write_bytecode = True  # beside the program's modules
        self._handlers = handlers
        if handlers and not self._added:
            self._added = True
            self._add()

    @contextmanager
    def off(self) -> Iterator[None]:
        """For what we do ourselves."""
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

    def _starter(self, event: str) -> Callable[[tuple[Any, ...], Optional[FrameType]], None]:
        def on_start(args: tuple[Any, ...], frame: Optional[FrameType]) -> None:
            if not self._is_import(frame):
                self._referee.refuse(PolicyDenied("dangerous_functions", f"Function {event}"))

        return on_start

    def _is_import(self, frame: Optional[FrameType]) -> bool:
        """Whether a module of a library does it while it is imported."""
        while frame is not None and not self._is_agents(frame):
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                return True
            frame = frame.f_back
        return False

    def _on_load(self, args: tuple[Any, ...], frame: Optional[FrameType]) -> None:
        """What a library loads is its own business."""
        while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "ctypes":
            frame = frame.f_back
        if frame is not None and self._is_agents(frame):
            self._referee.refuse(PolicyDenied("dangerous_functions", "Function ctypes.dlopen"))

    # -- files

    def _on_open(self, args: tuple[Any, ...], frame: Optional[FrameType]) -> None:
        path, mode, flags = args
        if isinstance(path, int):
            return  # open already
        refused = self._referee.rules.refused
        if "open" in refused and mode is not None and frame is not None and self._is_agents(frame):
            self._referee.refuse(PolicyDenied("open", "Function io.open"))
        if "file_writing" not in refused or not flags & _WRITING or path in (os.devnull, os.devnull.encode()):
            return
        while frame is not None and frame.f_globals.get("__name__") in _OPENERS and not self._is_agents(frame):
            frame = frame.f_back
        if (frame is not None and self._is_agents(frame)) or self._is_inside(path):
            self._referee.refuse(PolicyDenied("file_writing", f"Opening {_fsdecode(path)!r} for writing"))

    def _is_inside(self, path: Any) -> bool:
        return _realpath(_join(_getcwd(), _fsdecode(path))).startswith(self._inside)

    def _is_agents(self, frame: FrameType) -> bool:
        return frame.f_builtins is self._agent_builtins
