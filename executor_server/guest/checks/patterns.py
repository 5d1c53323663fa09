"""Rewrites patterns so that the language rules see the attributes that they read.

A pattern has no place for a call, so its attributes are checked next to it:

- `case C(a=x)` becomes `case C(a=_) as x if (x := part(x, "a"),)`. The pattern only tests that the attribute is there;
  the hook `part` reads it, checks it, and returns the value for the name. Positional attributes are read in the same
  way, but the class names them.
- Any other pattern below an attribute, such as `a=D()`, `a=[x]` or `a=D.b`, would pass the value on before a check. So
  an inserted case, which never matches, first passes the class and the attribute to the hook `match`. It accepts
  classes of the program's own only, whose instances hold what the program has set. Literals stay as they are.
- A dotted name whose value is compared is also evaluated in an inserted case, where the rules for accesses apply.

So a captured attribute is read twice, and dotted names and some classes are evaluated before the pattern is tried.

Under `foreign_modules` alone, an attribute by keyword is checked only if modules have its name.
"""

from __future__ import annotations

import ast
from ast import AST, Attribute, Load, Name

from .accesses import EVERYTHING, NAMES, leads_on, replace_below
from .sentinels import call, position

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable, Iterator, Union

    from .rules import Rules
    from .sentinels import Sentinels

# CPython 3.10 and later.
_Match: Any = getattr(ast, "Match", ())
_MatchAs: Any = getattr(ast, "MatchAs", ())
_MatchClass: Any = getattr(ast, "MatchClass", ())
_MatchMapping: Any = getattr(ast, "MatchMapping", ())
_MatchOr: Any = getattr(ast, "MatchOr", ())
_MatchSingleton: Any = getattr(ast, "MatchSingleton", ())
_MatchValue: Any = getattr(ast, "MatchValue", ())


def guard_patterns(nodes: Iterable[AST], sentinels: Sentinels, rules: Rules) -> bool:
    """Rewrites the patterns among the nodes of a tree in place. Returns true if there are any."""
    found = False
    for node in nodes:
        if isinstance(node, _Match):
            found = True
            match: Any = node
            match.cases = [each for case in match.cases for each in _Guard(sentinels, rules).guarded(case)]
    return found


class _Guard:
    """The guard of one case."""

    def __init__(self, sentinels: Sentinels, rules: Rules) -> None:
        self._sentinels = sentinels
        self._names = bool(rules.refused & NAMES)
        self._everything = bool(rules.refused & EVERYTHING)
        self._values = self._everything or "foreign_modules" in rules.refused
        self._shown: list[Any] = []  # conditions of the inserted cases
        self._reads: list[Any] = []

    def guarded(self, case: Any) -> list[Any]:
        """Returns the inserted cases and the case."""
        inside: list[Any] = list(ast.walk(case.pattern))
        captured_once = _captured_once(inside)
        wrapped: dict[int, Any] = {}
        for node in inside:
            if isinstance(node, _MatchClass) and (node.patterns or node.kwd_patterns):
                wrapped[id(node)] = self._class(node, captured_once)
            elif self._values and isinstance(node, _MatchValue):
                self._value(node.value)
            elif self._values and isinstance(node, _MatchMapping):
                for key in node.keys:
                    self._value(key)
        for node in (case, *inside):
            replace_below(node, wrapped)
        if self._reads:
            conditions = self._reads if case.guard is None else [*self._reads, case.guard]
            at = position(conditions[-1])
            case.guard = ast.BoolOp(op=ast.And(), values=conditions, **at) if conditions[1:] else conditions[0]
        return [*(_inserted(condition) for condition in self._shown), case]

    def _class(self, node: Any, captured_once: set[str]) -> Any:
        """Takes the captures out of a class pattern; returns it with the object bound to their names."""
        passed_on: list[Any] = []
        pattern = node
        for part, index, patterns in _parts(node):
            each = patterns[index]
            if not self._values or (isinstance(part, str) and not (self._everything or leads_on(part))):
                continue
            name = getattr(each, "name", None)
            if name in captured_once and (each.pattern is None or _is_literal(each.pattern)):
                at = position(each)
                patterns[index] = each.pattern or _MatchAs(pattern=None, name=None, **at)
                pattern = _MatchAs(pattern=pattern, name=name, **position(node))
                self._read(name, part, node.cls, at)
            elif not _is_literal(each):
                passed_on.append(part)
        if passed_on or (self._names and node.patterns):
            shown = [ast.Constant(value=part, kind=None, **position(node)) for part in passed_on]
            self._shown.append(call(self._sentinels.match, [_copy(node.cls), *shown], node))
        return pattern

    def _read(self, name: str, part: Union[str, int], cls: Any, at: dict[str, int]) -> None:
        """Adds the condition that binds the name to a checked attribute; a tuple, so that it is always true."""
        arguments = [Name(id=name, ctx=Load(), **at), ast.Constant(value=part, kind=None, **at), _copy(cls)]
        value = call(self._sentinels.part, arguments, arguments[0])
        bound = ast.NamedExpr(target=Name(id=name, ctx=ast.Store(), **at), value=value, **at)
        self._reads.append(ast.Tuple(elts=[bound], ctx=Load(), **at))

    def _value(self, value: Any) -> None:
        if isinstance(value, Attribute):
            at = position(value)
            tuple_ = ast.Tuple(elts=[_copy(value)], ctx=Load(), **at)
            self._shown.append(ast.UnaryOp(op=ast.Not(), operand=tuple_, **at))


def _parts(node: Any) -> Iterator[tuple[Union[str, int], int, list[Any]]]:
    """Yields each attribute that a class pattern reads, as a name or a position, with the place of its pattern."""
    for index in range(len(node.patterns)):
        yield index, index, node.patterns
    for index, name in enumerate(node.kwd_attrs):
        yield name, index, node.kwd_patterns


def _captured_once(nodes: list[Any]) -> set[str]:
    """Returns the names that one place of a pattern binds, and not several alternatives."""
    seen: set[str] = set()
    again: set[str] = set()
    for node in nodes:
        name = getattr(node, "name", None) or getattr(node, "rest", None)
        if name:
            (again if name in seen else seen).add(name)
    return seen - again


def _is_literal(pattern: Any) -> bool:
    """True for a pattern that binds nothing and passes the value to none of the program's own methods."""
    if isinstance(pattern, _MatchOr):
        return all(_is_literal(each) for each in pattern.patterns)
    if isinstance(pattern, _MatchValue):
        return not isinstance(pattern.value, Attribute)
    return isinstance(pattern, _MatchSingleton) or (isinstance(pattern, _MatchAs) and pattern.name is None)


def _inserted(condition: Any) -> Any:
    at = position(condition)
    case: Any = getattr(ast, "match_case")  # noqa: B009 (missing in CPython 3.9)
    return case(pattern=_MatchAs(pattern=None, name=None, **at), guard=condition, body=[ast.Pass(**at)])


def _copy(reference: Any) -> Any:
    """Copies a dotted name."""
    if isinstance(reference, Attribute):
        return Attribute(value=_copy(reference.value), attr=reference.attr, ctx=Load(), **position(reference))
    return Name(id=reference.id, ctx=Load(), **position(reference))
