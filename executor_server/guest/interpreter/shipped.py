"""Tools that run in the interpreter itself, made from source or pickles that the client shipped.

Their code is the client's own, not agent code. Like a library of the image it runs with Python's builtins: its imports
are not checked and its operations not counted. Agent code finds the tools among its builtins, next to the stubs of host
tools.

All tools of a registration are made before any is placed, so a failure keeps the earlier tools. Code that makes a tool
can raise anything, end the process or never return. Only exceptions are handled here; as with variables, the supervisor
bounds the time and the kernel the memory.

Each tool that comes as source is a module of its own, registered in sys.modules, so that its classes and functions can
be pickled. Its builtins are Python's and, behind these, the session's tools: one tool can call another.
"""

from __future__ import annotations

import builtins
import linecache
import sys
import types
from importlib.util import find_spec

from ..checks.failures import text_of
from ..wire.frames import MAX_MISSING_MODULES
from .encoding import decode_value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Union

    from ..wire.link_messages import PlacedTool

    Data = Union[bytes, memoryview]

_MAX_REASON_CHARS = 1000
# Captured: agent code may replace these names in their modules.
_compile, _exec, _find_spec, _modules, _lines = compile, exec, find_spec, sys.modules, linecache.cache


class ToolsRefused(Exception):
    """A tool can't be made, so none is. `modules` are those missing from the image, if that is the reason."""

    def __init__(self, message: str, modules: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.modules = list(modules)[:MAX_MISSING_MODULES]


class Unmade:
    """Stands for a missing tool, and raises with the reason when it is called."""

    def __init__(self, name: str, why_not: str) -> None:
        self.__name__ = self.__qualname__ = name
        self._why_not = why_not

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(f"the tool {self.__name__} is not available: {self._why_not}")


class ShippedTools:
    """Makes shipped tools, and owns their modules.

    `guarded` calls a function with arguments and bounds the agent code that this runs.
    """

    def __init__(self, guarded: Callable[..., Any]) -> None:
        self._guarded = guarded
        self._parts: dict[tuple[str, str], Data] = {}
        # The builtins of the tools' modules; a copy, so that tools do not become builtins of libraries.
        self._python_names = dict(vars(builtins))
        self._names = dict(self._python_names)
        self._in_place: dict[str, types.ModuleType] = {}  # modules, by the tool's name
        self._offered: dict[str, Any] = {}  # the session's tools

    def take_part(self, name: str, part: str, data: Data) -> None:
        """Takes the source, bindings or value of a tool of the next list."""
        self._parts[name, part] = data

    def clear(self, stubs: dict[str, Any]) -> None:
        """Removes the shipped tools; `stubs` are the session's tools from now on."""
        self._parts = {}
        self._settle({}, stubs)

    def drop(self, instead: dict[str, Any]) -> None:
        """Replaces these tools by the objects in `instead`."""
        modules = {name: module for name, module in self._in_place.items() if name not in instead}
        self._settle(modules, {**self._offered, **instead})

    def replace(
        self, specs: list[PlacedTool], stubs: dict[str, Any], *, again: bool = False
    ) -> tuple[dict[str, Any], str]:
        """Makes the tools of the list and replaces all earlier ones; `stubs` are the session's other tools.

        Raises ToolsRefused when one can't be made; the earlier tools then stay. With `again`, the tools are made again
        in a new interpreter: those that can be made are kept, the others raise when they are called, and the reasons
        are returned, too.
        """
        parts, self._parts = self._parts, {}
        failures, missing = self._find_missing(specs)
        if failures and not again:
            raise ToolsRefused(_listed(failures), missing)
        making = _Making()
        self._offer(stubs)
        made: dict[str, Any] = {}
        for name, spec in ((spec.name, spec) for spec in specs if spec.name not in failures):
            try:
                made[name] = self._guarded(self._make, spec, parts, making)
            except BaseException as error:  # noqa: BLE001 (the border of the client's code)
                failures[name] = _reason(error, name)
                making.undo(name if again else "")
                if not again:
                    self._offer(self._offered)
                    raise ToolsRefused(_listed(failures)) from None
        made.update({name: Unmade(name, f"it could not be made again: {why}") for name, why in failures.items()})
        self._settle({name: each for name, each in making.modules.items() if name not in failures}, {**stubs, **made})
        return made, _listed(failures)

    def _find_missing(self, specs: list[PlacedTool]) -> tuple[dict[str, str], list[str]]:
        """Returns why tools can't be made, by tool, and the missing modules, each once."""
        failures: dict[str, str] = {}
        missing: dict[str, None] = {}
        for spec in specs:
            try:
                lacking = self._guarded(_missing, spec.modules or [])
            except BaseException as error:  # noqa: BLE001 (the border of the image's code, which may be imported)
                failures[spec.name] = f"the search for its modules failed: {_reason(error)}"
            else:
                missing.update(dict.fromkeys(lacking))
                if lacking:
                    failures[spec.name] = f"the image has no module {', '.join(lacking)}"
        return failures, list(missing)

    def _make(self, spec: PlacedTool, parts: dict[tuple[str, str], Data], making: _Making) -> Any:
        """Makes one tool. Raises any exception of its code."""
        name = spec.name
        if (name, "source") in parts:
            tool = self._run(spec, parts, making)
        else:
            tool = decode_value(parts[name, "value"])
        if not callable(tool):
            raise TypeError(f"it is not callable; its type is {type(tool).__name__}")
        if spec.description and isinstance(tool, types.FunctionType) and not tool.__doc__:
            tool.__doc__ = spec.description
        return tool

    def _run(self, spec: PlacedTool, parts: dict[tuple[str, str], Data], making: _Making) -> Any:
        """Runs the source of a tool as a module and returns its entry."""
        text = bytes(parts[spec.name, "source"]).decode()
        bindings = decode_value(parts[spec.name, "bindings"]) if (spec.name, "bindings") in parts else {}
        if not isinstance(bindings, dict) or not all(isinstance(key, str) for key in bindings):
            raise TypeError("its bindings are not a dict with names as keys")
        filename, module = making.enter(spec.name, text)
        names = vars(module)
        names["__builtins__"] = self._names
        names.update(bindings)
        # `dont_inherit`: the `from __future__` of this file is not the tool's.
        _exec(_compile(text, filename, "exec", dont_inherit=True), names)
        if spec.entry not in names:
            raise NameError(f"its source does not define {spec.entry}")
        return names[spec.entry]

    def _offer(self, tools: dict[str, Any]) -> None:
        """Makes exactly these tools available to tools, behind Python's builtins."""
        names = {**tools, **self._python_names}
        self._names.update(names)
        for name in set(self._names) - set(names):
            del self._names[name]

    def _settle(self, modules: dict[str, types.ModuleType], tools: dict[str, Any]) -> None:
        """Installs these modules and tools, and removes the other modules."""
        for name, module in self._in_place.items():
            if name not in modules and _modules.get(module.__name__) is module:
                del _modules[module.__name__]
                _lines.pop(_filename(name), None)
        self._in_place = dict(modules)
        self._offered = tools
        self._offer(tools)


class _Making:
    """The modules of tools in the making, which can be undone."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}  # by the tool's name
        self._before: list[tuple[Any, str, Any]] = []

    def enter(self, name: str, text: str) -> tuple[str, types.ModuleType]:
        """Registers a new module for this source. Returns the name of its (missing) file, and the module."""
        module = self.modules[name] = types.ModuleType(f"tool_{name}")
        filename = _filename(name)
        self._put(_modules, module.__name__, module)
        # For tracebacks, and for inspect.getsource.
        self._put(_lines, filename, (len(text), None, text.splitlines(keepends=True), filename))
        return filename, module

    def _put(self, where: Any, key: str, value: Any) -> None:
        self._before.append((where, key, where.get(key)))
        where[key] = value

    def undo(self, name: str = "") -> None:
        """Restores the entries from before the tools were made, or from before this tool was."""
        keys = {f"tool_{name}", _filename(name)}
        for where, key, value in reversed(self._before):
            if name and key not in keys:
                continue
            if value is None:
                where.pop(key, None)
            else:
                where[key] = value


def _filename(name: str) -> str:
    return f"<tool-{name}>"


def _missing(modules: list[str]) -> list[str]:
    """Returns the modules that can't be found. The search for a module in a package imports the package."""
    return [name for name in modules if not _is_there(name)]


def missing_modules(names: list[str]) -> list[str]:
    """Returns the top-level modules that can't be found. Imports nothing."""
    return [name for name in names if not _can_be_found(name)]


def _can_be_found(name: str) -> bool:
    try:
        return _is_there(name)
    except Exception:  # noqa: BLE001 (a finder of the image's own fails: then the import itself decides)
        return True


def _is_there(name: str) -> bool:
    if _modules.get(name) is not None:
        return True
    try:
        return _find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # its package is missing


def _reason(error: BaseException, name: str = "") -> str:
    """Returns why a tool can't be made, with the line of its source that raised."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if name and trace.tb_frame.f_code.co_filename == _filename(name):
            line = trace.tb_lineno
        trace = trace.tb_next
    text = f"{type(error).__name__}: {text_of(error)[:_MAX_REASON_CHARS]}"
    return f"{text} (line {line} of its source)" if line else text


def _listed(failures: dict[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in failures.items())
