"""Says which modules are the program's own: Python files in the workspace, or wherever else the sandbox can write.

They are agent code like the program itself: checked, instrumented, and run with the builtins of agent code
(import_system.py). The rule imports.workspace says whether they have to be authorized by name.

Only a file's path decides. It is a library's if it lies below a directory that was on `sys.path` when the interpreter
began, or in a file system that can't be written. It is the program's when a symlink leads to it, since the program can
make one, or when its package is the program's, since that can change its `__path__`.
"""

from __future__ import annotations

import os
import re
import sys

from .modules import is_module, names_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Iterator, Sequence

# Modules of the guest that stand for IPython's where it is not installed (interpreter/notebook.py). They give a program
# nothing that it lacks, so they count as its own.
NOTEBOOK_MODULES = ("IPython", "IPython.core", "IPython.core.display", "IPython.display")
# Directories in which the checker looks for a module before it refuses a source.
_MAX_DIRECTORIES = 1_000

_abspath, _realpath, _statvfs, _fsdecode = os.path.abspath, os.path.realpath, os.statvfs, os.fsdecode
_find_spec: Any = sys.modules["_frozen_importlib"]._find_spec


class NoModules:
    """The modules of a program that has none."""

    def has(self, module: str) -> bool:
        """True when the import of this module would load code of the program's own."""
        return False

    def owns(self, module: ModuleType) -> bool:
        """True for a loaded module of the program's own."""
        return False

    def owns_path(self, path: Any) -> bool:
        """True for a file that does not belong to a library."""
        return False

    def owns_names(self, names: dict[str, Any]) -> bool:
        """True for the namespace of a loaded module of the program's own."""
        return False

    def library_name(self, path: Any) -> str:
        """Returns the name by which a program imports this file of a library; empty for any other."""
        return ""

    def refresh(self) -> None:
        """Makes the next import see files that were written a moment ago."""


class FoundFiles(NoModules):
    """Files that may be modules, for the checker. It doesn't know the interpreter's `sys.path`, so it gives the program
    the benefit of the doubt: the same rules are applied again when the import happens."""

    def __init__(self, directories: Sequence[str], source: str) -> None:
        self._directories = directories
        self._source = source
        self._names: set[str] = set()

    def has(self, module: str) -> bool:
        if not self._names:
            # First those that the program itself may be about to write: "helper.py", f"{directory}/helper.py", "pack".
            self._names.update(re.findall(r"""(?<=['"/\s])\w+(?=\.py\b|/|['"])""", self._source))
            for below, files in self._listings():
                self._names.update(below, (file.partition(".")[0] for file in files))
            self._names.update(("", NOTEBOOK_MODULES[0]))
        return module.partition(".")[0] in self._names

    def _listings(self) -> Iterator[tuple[list[str], list[str]]]:
        left = _MAX_DIRECTORIES
        for directory in self._directories:
            for place, below, files in os.walk(directory):
                # A mounted directory is a library: the environment of an image may live below /tmp.
                below[:] = [name for name in below if not os.path.ismount(f"{place}/{name}")]
                left -= 1
                if left < 0:
                    return
                yield below, files


class OwnModules(NoModules):
    """The modules of the program in an interpreter."""

    def __init__(self, archive: str, stand_ins: type) -> None:
        """`archive` has the guest's own modules. Modules from a loader of type `stand_ins` count as the program's."""
        self._stand_ins = stand_ins
        self._spaces: dict[int, dict[str, Any]] = {}  # names of loaded modules of the program's own
        known = [os.path.dirname(os.__file__), archive, *sys.path]
        self._libraries = tuple({f"{form(each).rstrip('/')}/" for each in known for form in (_abspath, _realpath)})

    def add(self, module: ModuleType) -> None:
        """Notes a module that is about to be loaded from a file of the program's."""
        names = names_of(module)
        self._spaces[id(names)] = names

    def is_own_file(self, path: Any, module: str) -> bool:
        """True for a file of the program's that is loaded as this module."""
        return self.owns_path(path) or ("." in module and self.has(module))

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
        names = names_of(module)
        return id(names) in self._spaces or self._is_own_spec(names.get("__spec__"), only_namespace=True)

    def owns_names(self, names: dict[str, Any]) -> bool:
        return id(names) in self._spaces

    def _is_own_spec(self, spec: Any, *, only_namespace: bool = False) -> bool:
        if type(getattr(spec, "loader", None)) is self._stand_ins:
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
            return True  # in an archive, or missing

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
            if finder is None:  # cached as "not a directory"
                sys.path_importer_cache.pop(path, None)
            elif hasattr(finder, "invalidate_caches"):  # its listing is as old as the directory's mtime: steps of 4 ms
                finder.invalidate_caches()
