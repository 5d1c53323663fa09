"""The guest's modules as bytecode. The daemon's interpreter writes it, and the same interpreter reads it in sandboxes.

    python -I -S bytecode.py DIRECTORY < SOURCES > BYTECODE

SOURCES is a JSON object that maps names in the archive to sources. DIRECTORY is the directory that tracebacks show.
BYTECODE is an entry of the archive, at a known place. It starts with the interpreter's magic number. Then follow,
marshalled, this module, the places of the other modules, and those modules. The program that starts a guest executes
this module (`import_program` in wire/paths.py). An interpreter with another magic number imports the sources, which are
in the archive, too.

zipimport could take bytecode from the archive as well. But it first reads the archive's whole directory, in Python, and
it searches, opens and unpacks for each module. That takes a third of the time of the supervisor's imports, and 0.3 MiB
of memory that the processes of a sandbox can't share.

Docstrings, annotations of functions, and columns are left out, because nothing in a sandbox reads them. They were a
fifth of the bytecode. Line numbers and assertions stay.
"""

from __future__ import annotations

import marshal
import sys
from _frozen_importlib import ModuleSpec
from _frozen_importlib_external import MAGIC_NUMBER

TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from typing import IO, Any, Optional

    Places = dict[str, tuple[int, int, bool]]
    """By a module's name: its position and size in bytes, and whether it is a package."""

_INIT = ".__init__"


class Importer:
    """Finds the modules of an archive, and loads each when it is imported."""

    def __init__(self, archive: str, start: int, places: Places) -> None:
        self._archive = archive
        self._start = start
        self._places = places

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Optional[ModuleSpec]:
        place = self._places.get(name)
        return None if place is None else ModuleSpec(name, self, is_package=place[2])  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        """Has Python make a plain module."""

    def exec_module(self, module: types.ModuleType) -> None:
        position, size_bytes, _ = self._places[module.__name__]
        with open(self._archive, "rb", 0) as file:
            file.seek(self._start + position)
            code = marshal.loads(file.read(size_bytes))
        module.__file__ = code.co_filename
        exec(code, module.__dict__)


def install(archive: str, file: IO[bytes]) -> None:
    """Makes imports search `archive` first. `file` is the open archive, read as far as the end of this module."""
    places = marshal.load(file)
    sys.meta_path.insert(0, Importer(archive, file.tell(), places))
    # Marks these globals as a module's, as an import would: agent code that reaches them then needs an authorization.
    globals()["__spec__"] = ModuleSpec(__name__, None)


def write() -> None:
    """Compiles the sources on standard input, and writes the bytecode to standard output."""
    import json

    directory, sources = sys.argv[1], json.load(sys.stdin)
    places: Places = {}
    blobs: list[bytes] = []
    end = 0
    for name in sorted(sources):
        module, is_package = name[: -len(".py")].replace("/", "."), False
        if module.endswith(_INIT):
            module, is_package = module[: -len(_INIT)], True
        blobs.append(marshal.dumps(_compiled(sources[name], f"{directory}/{name}")))
        places[module] = end, len(blobs[-1]), is_package
        end += len(blobs[-1])
    with open(__file__, encoding="utf-8") as file:
        this = marshal.dumps(_compiled(file.read(), f"{directory}/executor_guest/bytecode.py"))
    sys.stdout.buffer.write(b"".join((MAGIC_NUMBER, this, marshal.dumps(places), *blobs)))


def _compiled(source: str, path: str) -> types.CodeType:
    import ast

    tree = ast.parse(source)
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *functions)) and ast.get_docstring(node, clean=False):
            node.body = node.body[1:] or [ast.copy_location(ast.Pass(), node.body[0])]
        if isinstance(node, functions):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, (ast.expr, ast.stmt, ast.excepthandler, ast.arg, ast.keyword, ast.alias)):
            node.col_offset = node.end_col_offset = -1  # none
    return compile(tree, path, "exec", dont_inherit=True)


if __name__ == "__main__":
    write()
