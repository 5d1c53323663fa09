"""Guards Python's import system: its functions that import a module by name, and the loaders of files.

The functions (of importlib, runpy, pkgutil, …) import only authorized modules for agent code, and any for a library.
Code is the agent's when its frame has the agent's builtins, which all code of its namespace has. Only the calling frame
decides: a library that calls such a function for the agent, with a name that the agent chose, counts as a library.

Every way to load a Python source (import statements, importlib, runpy, a loader made by hand) gets its code from
`SourceFileLoader.get_code`. So the methods of the loaders are replaced, and no path of `sys.path` matters. Nothing is
cached for the program's own modules: two edits within a second can leave a file's time and size unchanged, and a
bytecode file, like an archive or a shared library, holds code that can't be checked.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import os
import sys
from types import ModuleType

from .imports import AGENT_BUILTINS, ImportDenied, check_import
from .modules import names_of, source_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterable, Optional

    from .own_modules import OwnModules
    from .rules import RuleEnforcer

    Asked = Callable[[tuple[Any, ...], dict[str, Any]], Iterable[Any]]
    """Returns the names that a call with these arguments imports."""

# Parts of a dotted name; the last ones may be attributes.
_MAX_PARTS = 32


class ImportFunctions:
    """Guards importlib's functions at once, and the others when agent code has imported their module."""

    def __init__(self, agent_builtins: dict[str, Any], enforcer: RuleEnforcer) -> None:
        self._agent_builtins = agent_builtins
        self._enforcer = enforcer
        self._guarded: set[str] = set()
        self.guard("importlib")
        self._guard_machinery()

    def guard(self, module: str) -> None:
        """Guards the functions of a module that agent code has imported."""
        owner = sys.modules.get(module)
        if module in self._guarded or module not in _FUNCTIONS or owner is None:
            return
        self._guarded.add(module)
        for name, asked in _FUNCTIONS[module].items():
            if name in vars(owner):  # not every Python has each of them
                self._wrap(owner, name, asked, _FILES.get(name))
        if module == "runpy":
            self._guard_runs(owner)

    def _guard_machinery(self) -> None:
        # Not `exec_module`: it is on the stack while a module's code runs, and tracebacks would show the wrapper.
        machinery: Any = importlib.machinery
        loaders = (machinery.SourceFileLoader, machinery.ExtensionFileLoader)
        for owner in {next(each for each in loader.__mro__ if "__init__" in vars(each)) for loader in loaders}:
            self._wrap(owner, "__init__", _argument(1, "fullname"), _argument(2, "path"))
        for importer in (machinery.BuiltinImporter, machinery.FrozenImporter):
            self._wrap(importer, "load_module", _argument(1, "fullname"))
            self._wrap(importer, "create_module", _spec(-1))

    def _wrap(self, owner: Any, name: str, asked: Asked, located: Optional[Asked] = None) -> None:
        """Guards a function; `located` returns the file that a call with these arguments loads."""
        raw = vars(owner)[name]
        kind: Any = type(raw) if isinstance(raw, (classmethod, staticmethod)) else None
        function = raw.__func__ if kind is not None else raw
        agent_builtins, enforcer = self._agent_builtins, self._enforcer

        def checked(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_builtins is not agent_builtins:
                return function(*args, **kwargs)
            modules = [module for module in asked(args, kwargs) if isinstance(module, str)]
            for module in modules:
                if located is None:
                    check_import(enforcer, module)
                else:
                    _check_file(enforcer, module, *located(args, kwargs))
            result = function(*args, **kwargs)
            for module in modules:
                self.guard(module)
            return agent_builtins[AGENT_BUILTINS] if result is builtins else result

        for attribute in ("__name__", "__qualname__", "__doc__", "__module__"):
            setattr(checked, attribute, getattr(function, attribute))
        setattr(owner, name, kind(checked) if kind is not None else checked)

    def _guard_runs(self, runpy: ModuleType) -> None:
        """Treats a file that agent code runs like text that it passes to `exec`: instruments it and runs it so."""
        agent_builtins, names, real_compile, real_exec = self._agent_builtins, vars(runpy), compile, exec

        def is_agents() -> bool:
            frame: Any = sys._getframe(2)
            while frame is not None and frame.f_globals is names:
                frame = frame.f_back
            return frame is not None and frame.f_builtins is agent_builtins

        def compile_file(source: Any, filename: Any, mode: str, *args: Any, **kwargs: Any) -> Any:
            function = agent_builtins["compile"] if is_agents() else real_compile
            return function(source, filename, mode, *args, **kwargs)

        def run_code(code: Any, namespace: dict[str, Any]) -> None:
            if is_agents():
                namespace["__builtins__"] = agent_builtins
            real_exec(code, namespace)

        names["compile"], names["exec"] = compile_file, run_code


def _check_file(enforcer: RuleEnforcer, module: str, path: Any) -> None:
    """Refuses to load a file under this name, unless the file is the program's own or an authorized library's."""
    own, rules = enforcer.own, enforcer.rules
    if isinstance(path, (str, bytes, os.PathLike)) and own.owns_path(path):
        names, may = [module], rules.authorizes_own
    else:
        names, may = [module, own.library_name(path) or module], rules.authorizes
    for name in names:
        if not may(name):
            enforcer.refuse(ImportDenied(name, rules))


def _argument(position: int, name: str) -> Asked:
    def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
        return (args[position] if len(args) > position else kwargs.get(name),)

    return asked


def _spec(position: int) -> Asked:
    def asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
        return (getattr(args[position] if args else kwargs.get("spec"), "name", None),)

    return asked


def _file_of_spec(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    loader = getattr(args[0] if args else kwargs.get("spec"), "loader", None)
    return (source_file(loader),)


def _relative(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    """Resolves a relative name: (name, package)."""
    name = args[0] if args else kwargs.get("name")
    package = args[1] if len(args) > 1 else kwargs.get("package")
    if isinstance(name, str) and name.startswith(".") and package:
        from importlib.util import resolve_name

        return (resolve_name(name, package),)
    return (name,)


def _statement(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    """Reads the arguments of `__import__`."""
    named = dict(zip(("name", "globals", "locals", "fromlist", "level"), args), **kwargs)
    name, level, fromlist = named.get("name"), named.get("level", 0), named.get("fromlist") or ()
    if not isinstance(name, str) or not isinstance(level, int):
        return ()
    return ("." * level + name, *(f"{name}.{each}" for each in fromlist if f"{name}.{each}" in sys.modules))


def _module(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    module = args[0] if args else kwargs.get("module")
    return (getattr(module, "__name__", None), getattr(getattr(module, "__spec__", None), "name", None))


def _path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Any]:
    """Reads a dotted name whose end may be an attribute: "os.path:join", "os.path.join"."""
    name = args[0] if args else kwargs.get("name", kwargs.get("path"))
    if not isinstance(name, str):
        return ()
    module, colon, _ = name.partition(":")
    if colon:
        return (module,)
    parts = module.split(".", _MAX_PARTS)
    prefixes = (".".join(parts[: end + 1]) for end in range(1, len(parts)))
    return (parts[0], *(prefix for prefix in prefixes if prefix in sys.modules))


_FILES: dict[str, Asked] = {
    "spec_from_file_location": _argument(1, "location"),
    "module_from_spec": _file_of_spec,
}
_FUNCTIONS: dict[str, dict[str, Asked]] = {
    "importlib": {
        "import_module": _relative,
        "__import__": _statement,
        "reload": _module,
        "find_loader": _argument(0, "name"),
    },
    "importlib.util": {
        "find_spec": _relative,
        "module_from_spec": _spec(0),
        "spec_from_file_location": _argument(0, "name"),
        "spec_from_loader": _argument(0, "name"),
    },
    "imp": {
        name: _argument(0, "name")
        for name in ("load_module", "load_source", "load_compiled", "load_dynamic", "load_package", "init_builtin")
    },
    "pkgutil": {
        "resolve_name": _path,
        "find_loader": _argument(0, "fullname"),
        "get_loader": _argument(0, "module_or_name"),
        "get_data": _argument(0, "package"),
    },
    "pydoc": {"locate": _path, "safeimport": _path},
    "runpy": {"run_module": _argument(0, "mod_name")},
}


# ---------------------------------------------------------------------------------------------------------------------
# Loaders


def guard_loaders(
    own: OwnModules, enforcer: RuleEnforcer, agent_builtins: dict[str, Any], make_code: Callable[..., Any]
) -> None:
    """Makes Python's loaders load the program's own modules as agent code.

    `make_code(source, path, package)` checks and instruments.
    """
    import zipimport
    from importlib import machinery

    def code_getter(real: Callable[..., Any]) -> Callable[..., Any]:
        def get_code(loader: Any, fullname: str) -> Any:
            path = loader.get_filename(fullname)
            if not own.is_own_file(path, fullname):
                return real(loader, fullname)
            package = fullname if loader.is_package(fullname) else fullname.rpartition(".")[0]
            return make_code(loader.get_data(path), path, package)

        return get_code

    def module_maker(real: Callable[..., Any]) -> Callable[..., Any]:
        def create_module(loader: Any, spec: Any) -> Any:
            if not own.is_own_file(loader.path, spec.name):
                return real(loader, spec)
            module = ModuleType(spec.name)
            names_of(module)["__builtins__"] = agent_builtins
            own.add(module)
            return module

        return create_module

    def unchecked(real: Callable[..., Any]) -> Callable[..., Any]:
        """Refuses code that is not source, unless the rules permit everything."""

        def checked(loader: Any, what: Any) -> Any:
            module = getattr(what, "name", what)
            path = getattr(loader, "path", None) or loader.archive
            if not enforcer.rules.permit_all and own.is_own_file(path, module):
                why = f": {path} is not Python source, so it can't be checked"
                enforcer.refuse(ImportDenied(module, enforcer.rules, why))
            return real(loader, what)

        return checked

    for owner, name, make in (
        (machinery.SourceFileLoader, "get_code", code_getter),
        (machinery.SourceFileLoader, "create_module", module_maker),
        (machinery.SourcelessFileLoader, "get_code", unchecked),
        (machinery.ExtensionFileLoader, "create_module", unchecked),
        (zipimport, "_get_module_code", unchecked),
    ):
        function = make(getattr(owner, name))
        function.__name__, function.__qualname__ = name, f"{getattr(owner, '__qualname__', '')}.{name}"
        setattr(owner, name, function)
