"""The objects that instrumented code calls, and their stand-ins in a syntax tree.

The calls that instrumentation adds are calls of constants, not names, so the program can't shadow them. A constant in a
syntax tree must be a plain value; so the tree gets sentinels (random bytes), and `bind` replaces them by the objects in
the compiled code.
"""

from __future__ import annotations

import ast
from ast import Call, Constant
from itertools import compress
from types import CodeType

from .control import guard

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator, Mapping

# Methods of `Hooks` (hooks.py).
HOOKS = ("enter", "load", "match", "part", "reach", "special", "verify")


class Sentinels:
    """Stand-ins for the objects that instrumented code calls; the checker and the interpreter use the same mark."""

    __slots__ = ("compress", "guard", "keep", "next", "ticks", *HOOKS)
    if TYPE_CHECKING:
        compress: bytes
        enter: bytes
        guard: bytes
        keep: bytes
        load: bytes
        match: bytes
        next: bytes
        part: bytes
        reach: bytes
        special: bytes
        ticks: bytes
        verify: bytes

    def __init__(self, mark: str) -> None:
        """`mark` is random, so that no constant of a program is taken for a sentinel."""
        for name in self.__slots__:
            setattr(self, name, f"{mark}:{name}".encode())

    def constants(self, ticks: Iterator[bool], hooks: Any = None, keep: LastValue | None = None) -> dict[bytes, object]:
        """Returns the object that `bind` puts in place of each sentinel.

        Only code made with an output mode needs `keep`; only code made under language rules needs `hooks`.
        """
        hooked = {} if hooks is None else {getattr(self, name): getattr(hooks, name) for name in HOOKS}
        return {
            **hooked,
            self.next: next,
            self.compress: compress,
            self.ticks: ticks,
            self.guard: guard,
            # A bound method: twice as fast to call as an object with __call__, which counts in a loop.
            self.keep: None if keep is None else keep.keep,
        }


class LastValue:
    """Keeps the last value of one execution that is not None."""

    def __init__(self) -> None:
        self.value: Any = None

    def keep(self, value: Any) -> Any:
        if value is not None:
            self.value = value
        return value


def bind(code: CodeType, constants: Mapping[bytes, object]) -> CodeType:
    """Returns the code with its sentinels replaced, in nested functions too."""
    changed = False
    bound: list[object] = []
    for constant in code.co_consts:
        if type(constant) is bytes and constant in constants:
            bound.append(constants[constant])
            changed = True
        elif type(constant) is CodeType:
            inner = bind(constant, constants)
            changed = changed or inner is not constant
            bound.append(inner)
        else:
            bound.append(constant)
    return code.replace(co_consts=tuple(bound)) if changed else code


def call(sentinel: bytes, arguments: list[Any], at: Any) -> Call:
    """Returns a call of the object that the sentinel stands for, at the position of a node."""
    where = position(at)
    return Call(func=Constant(value=sentinel, kind=None, **where), args=arguments, keywords=[], **where)


def position(node: Any) -> dict[str, int]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)):
        # The first line only: a traceback should not show the whole statement.
        end_line, end_column = node.lineno, node.col_offset
    else:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return {
        "lineno": node.lineno,
        "col_offset": node.col_offset,
        "end_lineno": end_line,
        "end_col_offset": end_column,
    }
