"""Collects a shipment: the text of one module, the values bound in it, and the problems found.

Most tools use the names of one module, which are simply the names of the text. Source from another of the user's
modules keeps a namespace of its own, so that equal names stay separate: it is a string inside the text, executed in a
module of its own.
"""

from __future__ import annotations

import json
import keyword
from dataclasses import dataclass
from typing import Any

PREFIX = "_shipped_"
"""The prefix of all names that are not the user's."""

_HELPERS = {
    "run": '''\
def _shipped_run(space, source):
    """Runs a part of the tool that has a namespace of its own."""
    import linecache
    name = "<%s-%d>" % (space.__name__, sum(1 for each in linecache.cache if each.startswith("<" + space.__name__)))
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    exec(compile(source, name, "exec", dont_inherit=True), space.__dict__)
''',
    "space": '''\
def _shipped_space(name):
    """A namespace for what comes from another module."""
    import sys
    import types
    name = __name__ + "." + name
    space = sys.modules[name] = types.ModuleType(name)
    return space
''',
    "closed": '''\
def _shipped_closed(function, cells):
    """The function with these variables around it."""
    import types
    names = function.__code__.co_freevars
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__,
                              tuple(cells[name] for name in names))
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__doc__ = function.__qualname__, function.__doc__
    return made
''',
    "other": '''\
def _shipped_other(name):
    """Another tool of the session, as it is when it is called."""
    builtins = __builtins__
    def call(*args, **kwargs):
        return builtins[name](*args, **kwargs)
    call.__name__ = call.__qualname__ = name
    return call
''',
    "state": '''\
def _shipped_state(made, state):
    """Gives an object the state that it had."""
    if hasattr(made, "__setstate__"):
        made.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        made.__dict__.update(state)
    for name, value in (slots or {}).items():
        object.__setattr__(made, name, value)
''',
}


@dataclass(frozen=True)
class Problem:
    """An object that can't be shipped. `lacks_source`: it could still be sent as bytecode."""

    name: str
    why: str
    lacks_source: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class StandIn:
    """Our source, which replaces an object of a library that the sandbox lacks. The text defines the name."""

    name: str
    text: str


@dataclass(eq=False)
class Space:
    """The namespace of one of the user's modules. `expression` refers to it; empty for the text's own namespace."""

    namespace: dict[str, Any]
    expression: str = ""

    def named(self, name: str) -> str:
        return f"{self.expression}.{name}" if self.expression else name


class Writer:
    """Collects the text line by line, in the order of execution."""

    def __init__(self) -> None:
        self.bindings: dict[str, object] = {}
        self.modules: dict[str, None] = {}
        self.problems: list[Problem] = []
        self._lines: list[str] = []
        self._helpers: dict[str, None] = {}
        self._stand_ins: dict[str, None] = {}
        self._spaces: dict[int, Space] = {}
        self._count = 0

    def space(self, namespace: dict[str, Any]) -> Space:
        """Returns the space of these globals. The first one is the text's own."""
        if id(namespace) not in self._spaces:
            space = Space(namespace)
            if self._spaces:
                label = str(namespace.get("__name__", "module"))
                space.expression = self.fresh()
                self.say(f"{space.expression} = {self.helper('space')}({label!r})")
            self._spaces[id(namespace)] = space
        return self._spaces[id(namespace)]

    def fresh(self) -> str:
        self._count += 1
        return f"{PREFIX}{self._count}"

    def bind(self, value: object) -> str:
        """Returns a name that the value is bound to before the text runs."""
        name = self.fresh()
        self.bindings[name] = value
        return name

    def say(self, line: str) -> None:
        """Adds a line of our own to the text."""
        self._lines.append(line + "\n")

    def define(self, space: Space, text: str) -> None:
        """Adds a piece of the user's source, which runs in its namespace."""
        if not space.expression:
            self._lines.append(text)
            return
        literals = "\n".join(f"    {_literal(line)}" for line in text.splitlines(keepends=True))
        self.say(f"{self.helper('run')}({space.expression},\n{literals}\n)")

    def assign(self, space: Space, name: str, expression: str) -> None:
        target = space.named(name)
        if target != expression:
            self.say(f"{target} = {expression}")

    def set_attribute(self, target: str, name: str, expression: str) -> None:
        if name.isidentifier() and not keyword.iskeyword(name):
            self.say(f"{target}.{name} = {expression}")
        else:
            self.say(f"{self.library('builtins')}.setattr({target}, {name!r}, {expression})")

    def helper(self, name: str) -> str:
        self._helpers[name] = None
        return PREFIX + name

    def library(self, module: str) -> str:
        """Imports a module for our own lines, and returns its name there."""
        name = f"{PREFIX}{module}"
        line = f"import {module} as {name}\n"
        if line not in self._lines:
            self._lines.append(line)
        return name

    def stand_in(self, stand_in: StandIn) -> str:
        self._stand_ins[stand_in.text] = None
        return stand_in.name

    def refuse(self, name: str, why: str, *, lacks_source: bool = False) -> str:
        """Records a problem. Returns an expression to go on with, so that all other problems are found too."""
        problem = Problem(name, why, lacks_source)
        if problem not in self.problems:
            self.problems.append(problem)
        return "None"

    def text(self, title: str) -> str:
        """Returns the text of the module."""
        helpers = [_HELPERS[name] for name in self._helpers]
        head = (
            f"# The tool {title!r}, put together from its source. The names that begin with {PREFIX} are not its own.\n"
        )
        return "\n".join([head, *helpers, *self._stand_ins, "".join(self._lines)])


def _literal(line: str) -> str:
    """Returns the line as a literal, in double quotes if it is ASCII, since source often contains single ones."""
    return json.dumps(line) if line.isascii() else repr(line)
