"""What a shipment is written into: the text of one module, the values given to it, and what stood in the way.

Most tools use the names of one module, and those are simply the names of the text. What comes from another module of
the user's keeps a namespace of its own, so that equal names stay different things: it is a piece of text inside the
text, run in a module of its own.
"""

from __future__ import annotations

import json
import keyword
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

PREFIX = "_shipped_"
"""Of all names that are not the user's."""

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
    """One thing that can't be shipped. `lacks_source` is for what could still be carried as bytecode."""

    name: str
    why: str
    lacks_source: bool = False

    def __str__(self) -> str:
        return f"{self.name}: {self.why}"


@dataclass(frozen=True)
class StandIn:
    """Source, of ours, for what the sandbox has no library for. The text defines the name."""

    name: str
    text: str


@dataclass(eq=False)
class Space:
    """The namespace of one of the user's modules. `expression` leads to it in the text; empty for the text's own."""

    namespace: dict[str, Any]
    label: str
    expression: str = ""

    def named(self, name: str) -> str:
        return f"{self.expression}.{name}" if self.expression else name


class Writer:
    """Collects the text, line by line in the order in which it will run."""

    def __init__(self) -> None:
        self.bindings: dict[str, object] = {}
        self.modules: dict[str, None] = {}
        self.problems: list[Problem] = []
        self._lines: list[str] = []
        self._helpers: dict[str, None] = {}
        self._stand_ins: dict[str, None] = {}
        self._spaces: dict[int, Space] = {}
        self._count = 0
        self._late: list[Callable[[], None]] = []

    def space(self, namespace: dict[str, Any]) -> Space:
        """The space of these globals. The first one asked for is the text's own."""
        if id(namespace) not in self._spaces:
            label = str(namespace.get("__name__", "module"))
            space = Space(namespace, label)
            if self._spaces:
                space.expression = self.fresh()
                self.say(f"{space.expression} = {self.helper('space')}({label!r})")
            self._spaces[id(namespace)] = space
        return self._spaces[id(namespace)]

    def fresh(self) -> str:
        self._count += 1
        return f"{PREFIX}{self._count}"

    def bind(self, value: object) -> str:
        """A name that the text has this value under before it runs."""
        name = self.fresh()
        self.bindings[name] = value
        return name

    def say(self, line: str) -> None:
        """A line of the text's own."""
        self._lines.append(line + "\n")

    def define(self, space: Space, text: str) -> None:
        """A piece of the user's source, run in its namespace."""
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
        """A module that our own lines need, under a name of ours."""
        name = f"{PREFIX}{module}"
        line = f"import {module} as {name}\n"
        if line not in self._lines:
            self._lines.append(line)
        return name

    def stand_in(self, stand_in: StandIn) -> str:
        self._stand_ins[stand_in.text] = None
        return stand_in.name

    def refuse(self, name: str, why: str, *, lacks_source: bool = False) -> str:
        """Notes what can't be shipped; an expression to go on with, so that all else is found too."""
        problem = Problem(name, why, lacks_source)
        if problem not in self.problems:
            self.problems.append(problem)
        return "None"

    def text(self, title: str) -> str:
        """The text of the module."""
        helpers = [_HELPERS[name] for name in self._helpers]
        head = (
            f"# The tool {title!r}, put together from its source. The names that begin with {PREFIX} are not its own.\n"
        )
        return "\n".join([head, *helpers, *self._stand_ins, "".join(self._lines)])


def _literal(line: str) -> str:
    """The line as a literal that every Python reads alike, in double quotes: source has more of the other ones."""
    return json.dumps(line) if line.isascii() else repr(line)


@contextmanager
def nested(depth: list[int], limit: int) -> Iterator[bool]:
    """Counts how deep a recursion is; says whether it may go deeper."""
    depth[0] += 1
    try:
        yield depth[0] <= limit
    finally:
        depth[0] -= 1
