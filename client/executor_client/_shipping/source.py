"""Finds the source of functions and classes as it was when they were loaded.

A file may have changed since it was imported. So a definition found in it is compiled again and compared with the code
that runs here; if they differ, the definition has no source.
"""

from __future__ import annotations
import __future__

import ast
import functools
import linecache
import threading
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda

_FILES_KEPT = 16
"""Parsed files kept for the next tools, because an agent's tools are shipped at each run."""

NO_SOURCE = "its source is not available, or has changed since it was loaded"

_quiet = threading.Lock()

ANNOTATIONS_FLAG = __future__.annotations.compiler_flag


@dataclass(frozen=True)
class SourceFile:
    """A file of source, parsed, and the code objects that it compiles to."""

    lines: tuple[str, ...]
    tree: ast.Module
    codes: tuple[types.CodeType, ...]

    def compiles_to(self, code: types.CodeType) -> bool:
        """Returns True if the source compiles to exactly this code."""
        return any(each == code for each in self.codes) or any(each == code for each in self._codes_by_statement)

    @functools.cached_property
    def _codes_by_statement(self) -> tuple[types.CodeType, ...]:
        """The code objects of statements compiled one by one, as notebooks do: attributes of imports differ there."""
        flag = ANNOTATIONS_FLAG if self.quotes_annotations else 0
        statements = [ast.Module([node], []) for node in self.tree.body]
        with _quietly():
            made = [compile(each, "<shipped>", "exec", flag, dont_inherit=True) for each in statements]
        return tuple(inner for each in made for inner in all_codes(each))

    @property
    def quotes_annotations(self) -> bool:
        """True if the file has `from __future__ import annotations`."""
        return bool(self.codes[0].co_flags & ANNOTATIONS_FLAG)


@dataclass(frozen=True)
class Found:
    """A definition and its file."""

    file: SourceFile
    node: ast.AST


class SourceFiles:
    """The source files of one shipment, each read once."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile | None] = {}

    def function(self, function: types.FunctionType) -> Found | None:
        """Returns the def or lambda of the function; None if there is none, or it compiles to other code."""
        code = function.__code__
        for file in self._versions(code.co_filename, function.__globals__):
            if file.compiles_to(code):
                node = _function_node(file.tree, code)
                return None if node is None else Found(file, node)
        return None

    def class_(self, class_: type, functions: list[types.FunctionType], namespace: dict[str, Any]) -> Found | None:
        """Returns the class statement of the class, or None. `functions` are those of its body."""
        filename: object = functions[0].__code__.co_filename if functions else namespace.get("__file__")
        if not isinstance(filename, str):
            return None
        for file in self._versions(filename, namespace):
            inside = [function.__code__ for function in functions if file.compiles_to(function.__code__)]
            nodes = [
                node
                for node in _classes(file.tree, class_.__qualname__)
                if all(_holds(node, code.co_firstlineno) for code in inside)
            ]
            if len(nodes) == 1 and len(inside) == len(functions):
                return Found(file, nodes[0])
        return None

    def module(self, namespace: dict[str, Any]) -> ast.Module | None:
        """Returns the syntax tree of the module with these globals, or None."""
        filename = namespace.get("__file__")
        files = self._versions(filename, namespace) if isinstance(filename, str) else iter(())
        return next((file.tree for file in files), None)

    def _versions(self, filename: str, namespace: dict[str, Any]) -> Iterator[SourceFile]:
        """Yields the file as it was read earlier, which may be the version that runs, and then as it is now."""
        known = self._read(filename, namespace)
        if known is not None:
            yield known
        linecache.checkcache(filename)
        now = linecache.getlines(filename, namespace)
        if known is None or tuple(now) != known.lines:
            self._files.pop(filename, None)
            fresh = self._read(filename, namespace)
            if fresh is not None:
                yield fresh

    def _read(self, filename: str, namespace: dict[str, Any]) -> SourceFile | None:
        if filename not in self._files:
            self._files[filename] = _parsed(filename, tuple(linecache.getlines(filename, namespace)))
        return self._files[filename]


@functools.lru_cache(maxsize=_FILES_KEPT)
def _parsed(filename: str, lines: tuple[str, ...]) -> SourceFile | None:
    if not lines:
        return None
    text = "".join(lines)
    try:
        tree, code = compiled(text, filename)
    except (SyntaxError, ValueError):
        return None
    return SourceFile(lines, tree, tuple(all_codes(code)))


def compiled(text: str, filename: str = "<shipped>") -> tuple[ast.Module, types.CodeType]:
    """Parses and compiles the text without repeating its warnings. Raises SyntaxError and ValueError."""
    with _quietly():
        return ast.parse(text, filename), compile(text, filename, "exec", dont_inherit=True)


@contextmanager
def _quietly() -> Iterator[None]:
    # One thread at a time, because each restores the global filters that it found.
    with _quiet, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def all_codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields the code object and all nested ones."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from all_codes(constant)


def _function_node(tree: ast.Module, code: types.CodeType) -> FunctionNode | None:
    if code.co_name == "<lambda>":
        lambdas = [node for node in ast.walk(tree) if isinstance(node, ast.Lambda)]
        around = [node for node in lambdas if _is_around(node, code)]
        return min(around, key=_size, default=None)
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == code.co_name
        and _first_line(node) == code.co_firstlineno
    ]
    return nodes[0] if len(nodes) == 1 else None


def _is_around(node: ast.Lambda, code: types.CodeType) -> bool:
    """Returns True if all positions of the code are inside this lambda."""
    if node.lineno != code.co_firstlineno:
        return False
    spans = [span for span in code.co_positions() if span[2] is not None and span[3]]
    body = node.body
    start, end = (body.lineno, body.col_offset), (body.end_lineno or 0, body.end_col_offset or 0)
    inside = [span for span in spans if span[0] is not None and span[1] is not None]
    # The first instruction, RESUME, has the lambda's position without a width: it is skipped.
    return bool(inside) and all(
        start <= cast("tuple[int, int]", (s[0], s[2])) and cast("tuple[int, int]", (s[1], s[3])) <= end for s in inside
    )


def _size(node: ast.Lambda) -> tuple[int, int]:
    return (node.end_lineno or 0) - node.lineno, (node.end_col_offset or 0) - node.col_offset


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _holds(node: ast.ClassDef, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _classes(tree: ast.AST, qualname: str, prefix: str = "") -> Iterator[ast.ClassDef]:
    for node in ast.iter_child_nodes(tree):
        inner = prefix
        if isinstance(node, ast.ClassDef):
            if prefix + node.name == qualname:
                yield node
            inner = f"{prefix}{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{prefix}{node.name}.<locals>."
        yield from _classes(node, qualname, inner)


# ---------------------------------------------------------------------------------------------------------------------
# Extracting a definition from its file


@dataclass(frozen=True)
class Edit:
    """Replaces the text of a node."""

    node: ast.AST
    text: str


def cut_out(found: Found, edits: list[Edit], *, decorators: list[ast.expr] | None = None) -> str:
    """Returns the definition's text with the edits applied and its indentation removed.

    Only the given decorators are kept. Lines inside multi-line strings keep their indentation.
    """
    node = cast("Any", found.node)
    margin = node.col_offset if not isinstance(node, ast.Lambda) else 0
    body = _edited(found, node, edits)
    inside = _lines_inside_strings(found.node, node.lineno)
    lines = body.split("\n")
    shifted = [line if number == 0 or number in inside else _shift(line, margin) for number, line in enumerate(lines)]
    kept = [f"@{ast.unparse(decorator)}\n" for decorator in decorators or ()]
    return "".join(kept) + "\n".join(shifted) + "\n"


def indented(text: str, spaces: int = 4) -> str:
    """Returns the text indented, except lines that begin inside multi-line strings."""
    inside = _lines_inside_strings(ast.parse(text), 1)
    return "\n".join(
        line if number in inside or not line else " " * spaces + line for number, line in enumerate(text.split("\n"))
    )


def _shift(line: str, margin: int) -> str:
    stripped = line.lstrip()
    return line[min(margin, len(line) - len(stripped)) :]


def _lines_inside_strings(node: ast.AST, first: int) -> frozenset[int]:
    """Returns the numbers, 0 being line `first`, of lines that begin inside a string. Edits don't shift lines."""
    inside: set[int] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr | ast.Constant) and isinstance(getattr(each, "value", ""), str | bytes):
            start, end = cast("Any", each).lineno, cast("Any", each).end_lineno
            inside.update(range(start - first + 1, end - first + 1))
    return frozenset(inside)


def _edited(found: Found, node: Any, edits: list[Edit]) -> str:
    text, starts = _encoded(found.file)

    def offset(line: int, column: int) -> int:
        return starts[line - 1] + column

    begin, end = offset(node.lineno, node.col_offset), offset(node.end_lineno, node.end_col_offset)
    pieces, at = [], begin
    for edit in sorted(edits, key=lambda edit: (cast("Any", edit.node).lineno, cast("Any", edit.node).col_offset)):
        place = cast("Any", edit.node)
        from_, to = offset(place.lineno, place.col_offset), offset(place.end_lineno, place.end_col_offset)
        # Padded to as many lines as before, so that line numbers stay valid.
        padding = b"\\\n" * text.count(b"\n", from_, to)
        pieces += [text[at:from_], edit.text.encode(), b" " + padding if padding else b""]
        at = to
    return b"".join([*pieces, text[at:end]]).decode()


def _encoded(file: SourceFile) -> tuple[bytes, list[int]]:
    """Returns the text in bytes, which columns of a syntax tree count, and the offset of each line."""
    starts, at, lines = [], 0, [line.encode() for line in file.lines]
    for line in lines:
        starts.append(at)
        at += len(line)
    return b"".join(lines), starts
