"""Rewrites accesses to attributes, items and results of calls so that the hooks of the language rules see them.

`a.b` becomes a call of the hook `load` with `a` and "b". The results of `a[b]` and `a(b)` go through `verify`; the call
itself stays, so that a function that looks at its caller's frame, as `super()` does, still sees the program's. An
attribute named `format`, or another of SPECIAL_ATTRIBUTES, goes through `special`. A class that a pattern takes apart
by position is passed to `match` right before: the class, not the source, names the attributes that the pattern reads.

Only accesses that the rules in force need are rewritten. Values, order of evaluation and line numbers stay.
"""

from __future__ import annotations

import ast
from ast import AST, Attribute, Call, Constant, Load, Subscript

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

    from .instrumentation import Sentinels
    from .rules import Rules

# Attributes of strings and modules that take names of attributes as text.
SPECIAL_ATTRIBUTES = frozenset(("format", "format_map", "attrgetter", "methodcaller"))

_ALL = frozenset(("module_attributes", "dangerous_functions"))
_NAMES = frozenset(("dunder_access", "namespaces"))
MatchClass: Any = getattr(ast, "MatchClass", None)  # CPython 3.10 and later
match_case: Any = getattr(ast, "match_case", None)
_Match: Any = getattr(ast, "Match", ())


def hook_accesses(nodes: list[AST], sentinels: Sentinels, rules: Rules, skipped: Sequence[str] = ()) -> None:
    """Rewrites the nodes of a tree in place; each comes before those below it. Fields named in `skipped` are left."""
    everything, names = bool(rules.refused & _ALL), bool(rules.refused & _NAMES)
    if not (everything or names):
        return
    cases: list[Any] = [node for node in nodes if match_case is not None and isinstance(node, match_case)]
    patterns = {id(inside) for case in cases for inside in ast.walk(case.pattern)}
    editor = _Editor(sentinels, skipped, everything=everything)
    for node in reversed(nodes):  # the inner nodes first: an access that is replaced takes its parts along
        if id(node) not in patterns:  # a pattern names values; it has no place for a call
            editor.edit_below(node)
        if names and isinstance(node, _Match):
            editor.show_classes(node)


class _Editor:
    def __init__(self, sentinels: Sentinels, skipped: Sequence[str], *, everything: bool) -> None:
        self._sentinels = sentinels
        self._skipped = skipped
        self._everything = everything

    def edit_below(self, node: AST) -> None:
        for name in node._fields:
            if name in self._skipped:
                continue
            value = getattr(node, name, None)
            if isinstance(value, list):
                for index, item in enumerate(value):
                    if isinstance(item, AST):
                        value[index] = self._hooked(item)
            elif isinstance(value, AST):
                setattr(node, name, self._hooked(value))

    def _hooked(self, node: Any) -> Any:
        kind = type(node)
        if kind is Attribute and isinstance(node.ctx, Load):
            if node.attr in SPECIAL_ATTRIBUTES:
                return self._load(self._sentinels.special, node)
            if self._everything and not node.attr.startswith("__"):
                return self._load(self._sentinels.load, node)
            # The compiler mangles a private name of a class, so the access itself must stay.
            return call(self._sentinels.verify, [node], node) if self._everything else node
        if not self._everything:
            return node
        if (kind is Subscript and isinstance(node.ctx, Load)) or (kind is Call and type(node.func) is not Constant):
            return call(self._sentinels.verify, [node], node)
        return node

    def _load(self, sentinel: bytes, node: Attribute) -> Call:
        name = Constant(value=node.attr, kind=None, **position(node))
        return call(sentinel, [node.value, name], node)

    def show_classes(self, node: Any) -> None:
        """Inserts before each case that takes a class apart by position one that shows the class and never matches."""
        cases = []
        for case in node.cases:
            shown = [each.cls for each in ast.walk(case.pattern) if isinstance(each, MatchClass) and each.patterns]
            for each in shown:
                at = position(each)
                anything = ast.MatchAs(pattern=None, name=None, **at)  # type: ignore[attr-defined,unused-ignore]
                test = call(self._sentinels.match, [_copy(each)], each)
                skip: Any = ast.Pass(**at)
                cases.append(match_case(pattern=anything, guard=test, body=[skip]))
            cases.append(case)
        node.cases = cases


def call(sentinel: bytes, arguments: list[Any], at: Any) -> Call:
    """Returns a call of a hook, at the position of a node."""
    where = position(at)
    return Call(func=Constant(value=sentinel, kind=None, **where), args=arguments, keywords=[], **where)


def _copy(reference: Any) -> Any:
    """Copies a dotted name."""
    if isinstance(reference, Attribute):
        return Attribute(value=_copy(reference.value), attr=reference.attr, ctx=Load(), **position(reference))
    return ast.Name(id=reference.id, ctx=Load(), **position(reference))


def position(node: Any) -> dict[str, int]:
    return {
        "lineno": node.lineno,
        "col_offset": node.col_offset,
        "end_lineno": node.end_lineno or node.lineno,
        "end_col_offset": node.end_col_offset or node.col_offset,
    }
