"""Finds the owner of a module: Python, an installed package, or the user.

Modules of Python and of packages are imported in the sandbox, which must have them. The user's are shipped as source.
"""

from __future__ import annotations

import enum
import functools
import importlib.util
import site
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

_PACKAGE_DIRECTORIES = frozenset({"site-packages", "dist-packages"})


class Owner(enum.Enum):
    PYTHON = "python"
    INSTALLED = "installed"
    USER = "user"
    UNKNOWN = "unknown"
    """Not found here; the sandbox may have it."""


def owner_of(module: str) -> Owner:
    """Returns the owner of the module of this dotted name, as seen by this process."""
    top = module.partition(".")[0]
    if top == "__main__":
        return Owner.USER
    if top in sys.stdlib_module_names or top in sys.builtin_module_names:
        return Owner.PYTHON
    loaded = sys.modules.get(module) or sys.modules.get(top)
    places = _places(loaded) if loaded is not None else _places_by_name(top)
    if places is None:
        return Owner.UNKNOWN
    return Owner.INSTALLED if any(_is_installed(place) for place in places) else Owner.USER


def users_modules() -> list[ModuleType]:
    """Returns the loaded modules that are neither Python's nor installed."""
    return [
        module
        for name, module in list(sys.modules.items())
        if type(module) is ModuleType and name != "__main__" and owner_of(name) is Owner.USER
    ]


def _places(module: ModuleType) -> list[str]:
    file = getattr(module, "__file__", None)
    return [file] if isinstance(file, str) else [str(path) for path in getattr(module, "__path__", ())]


def _places_by_name(top: str) -> list[str] | None:
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    return [spec.origin] if spec.has_location and spec.origin else list(spec.submodule_search_locations or ())


def _is_installed(place: str) -> bool:
    path = Path(place).absolute()
    if not _PACKAGE_DIRECTORIES.isdisjoint(path.parts):
        return True
    return any(path.is_relative_to(directory) for directory in _library_directories())


@functools.cache
def _library_directories() -> frozenset[Path]:
    paths = sysconfig.get_paths()
    named = [paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    return frozenset(Path(each) for each in (*named, *site.getsitepackages(), site.getusersitepackages()))
