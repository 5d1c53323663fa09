"""Modules of the program's own: Python files in the workspace, or wherever else the sandbox can write.

They are agent code like the program itself: checked, instrumented, and run with the builtins of agent code. The rule
imports.workspace says whether they have to be authorized by name.

Theory of operation. Every way to load a Python source (import statements, importlib, runpy, a loader made by hand)
gets its code from `SourceFileLoader.get_code`, so the methods of the loaders are replaced, and no path of `sys.path`
matters. Only a loader's path decides. A file is a library's if it lies below a directory that was on `sys.path` when
the interpreter began, or in a file system that can't be written. It is the program's when a symlink leads to it, since
the program can make one, or when its package is the program's, since that can change its `__path__`.

Nothing is cached: two edits within a second leave a file's time and size as they were, and a bytecode file, like an
archive or a shared library, holds code that can't be checked.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

from .imports import ImportDenied
from .module_check import is_module
from .own_modules import NoModules

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

    from .rule_enforcer import RuleEnforcer

_abspath, _realpath, _statvfs, _fsdecode = os.path.abspath, os.path.realpath, os.statvfs, os.fsdecode
_names_of: Any = type.__dict__["__dict__"].__get__(ModuleType)["__dict__"].__get__
_find_spec: Any = sys.modules["_frozen_importlib"]._find_spec


class OwnModules(NoModules):
    """Makes the interpreter's loaders heed whose code it is that they load."""

    def __init__(
        self,
        agent_builtins: dict[str, Any],
        enforcer: RuleEnforcer,
        make_code: Callable[..., Any],
        archive: str,
        notebook: object,
    ) -> None:
        """`make_code(source, path, package)` checks and instruments; `archive` has the guest's own modules, and
        `notebook` loads those that a program may use as its own."""
        self._builtins = agent_builtins
        self._enforcer = enforcer
        self._make_code = make_code
        self._notebook = notebook
        self._spaces: dict[int, dict[str, Any]] = {}  # names of loaded modules of the program's own
        known = [os.path.dirname(os.__file__), archive, *sys.path]
        self._libraries = tuple({f"{form(each).rstrip('/')}/" for each in known for form in (_abspath, _realpath)})
        self._take_over()

    def has(self, module: str) -> bool:
        top = module.partition(".")[0]
        loaded = sys.modules.get(top)
        if loaded is not None:
            return is_module(loaded) and self.owns(loaded)
        try:
            return bool(top) and self._is_own_spec(_find_spec(top, None))
        except Exception:  # noqa: BLE001 (a finder that a library has added: the import itself reports its failure)
            return False

    def owns(self, module: ModuleType) -> bool:
        names = _names_of(module)
        return id(names) in self._spaces or self._is_own_spec(names.get("__spec__"), only_namespace=True)

    def owns_names(self, names: dict[str, Any]) -> bool:
        return id(names) in self._spaces

    def _is_own_spec(self, spec: Any, *, only_namespace: bool = False) -> bool:
        if getattr(spec, "loader", None) is self._notebook:
            return True
        if spec is None or (spec.has_location and only_namespace):
            return False
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or ())
        return bool(places) and all(map(self.owns_path, places))

    def owns_path(self, path: Any) -> bool:
        plain = _abspath(_fsdecode(path))
        if f"{plain}/".startswith(self._libraries):
            return False
        try:
            return _realpath(plain) != plain or not _statvfs(plain).f_flag & os.ST_RDONLY
        except OSError:
            return True  # in an archive, or not there

    def library_name(self, path: Any) -> str:
        plain = _abspath(_fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else ""
        for root in sorted(self._libraries, key=len, reverse=True):
            if plain.startswith(root):
                directory, _, file = plain[len(root) :].rpartition("/")
                name = f"{directory}/{file.partition('.')[0]}".strip("/").replace("/", ".")
                return name[: -len(".__init__")] if name.endswith(".__init__") else name
        return ""

    def refresh(self) -> None:
        for path, finder in list(sys.path_importer_cache.items()):
            if f"{path}/".startswith(self._libraries):
                continue
            if finder is None:  # remembered as no directory
                sys.path_importer_cache.pop(path, None)
            elif hasattr(finder, "invalidate_caches"):  # its list is of a directory whose time has steps of 4 ms
                finder.invalidate_caches()

    # -- loaders

    def _take_over(self) -> None:
        import zipimport
        from importlib import machinery

        def replace(owner: Any, name: str, make: Callable[..., Any]) -> None:
            function = make(getattr(owner, name))
            function.__name__, function.__qualname__ = name, f"{getattr(owner, '__qualname__', '')}.{name}"
            setattr(owner, name, function)

        replace(machinery.SourceFileLoader, "get_code", self._get_code)
        replace(machinery.SourceFileLoader, "create_module", self._create_module)
        replace(machinery.SourcelessFileLoader, "get_code", self._unchecked)
        replace(machinery.ExtensionFileLoader, "create_module", self._unchecked)
        replace(zipimport, "_get_module_code", self._unchecked)

    def _is_own(self, path: Any, module: str) -> bool:
        return self.owns_path(path) or ("." in module and self.has(module))

    def _get_code(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def get_code(loader: Any, fullname: str) -> Any:
            path = loader.get_filename(fullname)
            if not self._is_own(path, fullname):
                return real(loader, fullname)
            package = fullname if loader.is_package(fullname) else fullname.rpartition(".")[0]
            return self._make_code(loader.get_data(path), path, package)

        return get_code

    def _create_module(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def create_module(loader: Any, spec: Any) -> Any:
            if not self._is_own(loader.path, spec.name):
                return real(loader, spec)
            module = ModuleType(spec.name)
            names = _names_of(module)
            names["__builtins__"] = self._builtins
            self._spaces[id(names)] = names
            return module

        return create_module

    def _unchecked(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """Refuses code in another form than source, unless there is nothing that could be refused."""

        def checked(loader: Any, what: Any) -> Any:
            module = getattr(what, "name", what)
            path = getattr(loader, "path", None) or loader.archive
            if not self._enforcer.rules.permit_all and self._is_own(path, module):
                why = f": {path} is not Python source, so it can't be checked"
                self._enforcer.refuse(ImportDenied(module, self._enforcer.rules, why))
            return real(loader, what)

        return checked
