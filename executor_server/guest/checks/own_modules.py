"""Says which modules are the program's own: files in its workspace, which are agent code (own_loaders.py)."""

from __future__ import annotations

import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Iterator, Sequence

# Modules of the guest that stand for IPython's where it is not installed (interpreter/notebook.py). They give a program
# nothing that it has not, so they are taken for its own.
NOTEBOOK_MODULES = ("IPython", "IPython.core", "IPython.core.display", "IPython.display")
# Directories in which the checker looks for a module before it refuses a source.
_MAX_DIRECTORIES = 1_000


def source_file(loader: object) -> Any:
    """Returns the file that Python's own loader of sources loads; None for any other loader."""
    kind = sys.modules["_frozen_importlib_external"].SourceFileLoader  # importlib.machinery costs a checker memory
    return loader.path if type(loader) is kind else None  # type: ignore[attr-defined]


class NoModules:
    """The modules of a program that has none."""

    def has(self, module: str) -> bool:
        """True when the import of this module would load code of the program's own."""
        return False

    def owns(self, module: ModuleType) -> bool:
        """True for a loaded module of the program's own."""
        return False

    def owns_path(self, path: Any) -> bool:
        """True for a file that is no library's."""
        return False

    def owns_names(self, names: dict[str, Any]) -> bool:
        """True for the names of such a module."""
        return False

    def library_name(self, path: Any) -> str:
        """Returns the name by which a program imports this file of a library; empty for any other."""
        return ""

    def refresh(self) -> None:
        """Makes the next import see files that were written a moment ago."""


class FoundFiles(NoModules):
    """Files that may be modules, for the checker. It doesn't know the interpreter's `sys.path`, so it doubts in favour
    of the program: the same rules hold when the import happens."""

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
            for _, below, files in os.walk(directory):
                left -= 1
                if left < 0:
                    return
                yield below, files
