"""The builtins of agent code: Python's own, except those that run text, import, wait for a person, or break a rule.

`exec`, `eval` and `compile` check the imports of their source and instrument it, as the checker does with the program
itself, so that a string can't evade the import rules or the operation budget. They behave like CPython's: the caller's
namespaces by default, the caller's `__future__` flags. One difference: a namespace passed to them always gets the
agent's `__builtins__`, because the checked `__import__` is among those.

A builtin that a language rule refuses still exists, since a name may be read without harm, as in an annotation. Calling
it, deriving from it, and isinstance with it are refused.

References are taken when this module is imported, before any agent code runs.
"""

from __future__ import annotations
import __future__ as future

import ast
import builtins
import os
import sys
from types import CodeType, FrameType, ModuleType

from .hooks import Hooks, locals_of
from .imports import AGENT_BUILTINS, CALLED_IMPORT, ImportDenied, Imports, make_import, make_statement_import
from .instrumentation import compile_tree, instrument
from .language import LISTED_BUILTINS, NAMESPACES, RUNNERS, PolicyDenied, find_refused
from .sentinels import bind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, NoReturn, Optional

    from .meter import Meter
    from .rules import RuleEnforcer
    from .sentinels import Sentinels

_exec, _eval, _compile, _input = builtins.exec, builtins.eval, builtins.compile, builtins.input

_FUTURE_FLAGS = 0
for _name in future.all_feature_names:
    _FUTURE_FLAGS |= getattr(future, _name).compiler_flag
_HOOKED = frozenset(("dunder_access", "namespaces", "module_attributes", "dangerous_functions"))
_IMPORTS = frozenset(("__import__", CALLED_IMPORT))


class Builtins:
    """Owns the builtins of agent code under the rules in force, and the additions, such as tools."""

    def __init__(
        self,
        names: dict[str, Any],
        enforcer: RuleEnforcer,
        meter: Meter,
        sentinels: Sentinels,
        imported: Callable[[str], object] = lambda _module: None,
    ) -> None:
        """`names` is the dict that code runs with: Python's builtins, and more. It changes with the rules.

        `imported` is called with each module that agent code imports.
        """
        self.names = names
        self.enforcer = enforcer
        self.hooks = Hooks(enforcer, names)
        self.constants = sentinels.constants(meter.ticks, self.hooks)
        self._instrumenter = Instrumenter(enforcer, sentinels, self.constants)
        names.update(self._checked(meter, imported))
        self._ordinary = dict(names)
        self._added: dict[str, Any] = {}
        self._placed = set(names)

    def _checked(self, meter: Meter, imported: Callable[[str], object]) -> dict[str, Any]:
        module = _AgentBuiltins(self.names)

        def given(result: Any, name: str, names: Any) -> Any:
            imported(name)
            for each in names or ():
                imported(f"{name}.{each}")
            return module if result is builtins else result

        called = make_import(self.enforcer, given)
        return {
            CALLED_IMPORT: called,
            AGENT_BUILTINS: module,
            "__import__": make_statement_import(called, self.hooks.members, builtins.__import__),
            "compile": _make_compile(self._instrumenter),
            "exec": _make_exec(self._instrumenter, meter.tick, self.names),
            "eval": _make_eval(self._instrumenter, meter.tick, self.names),
            "input": _make_input(),
            "breakpoint": _breakpoint,
            "exit": _exit,
            "quit": _exit,
        }

    def make_module_code(self, source: bytes, path: str, package: str) -> CodeType:
        """Returns the code of one of the program's own modules; `package` is the one it is in, if any."""
        return self._instrumenter.make(source, path, "exec", package=package)

    def add(self, added: dict[str, Any]) -> None:
        """Replaces the additions."""
        self._added = dict(added)
        self.on_rules()

    def on_rules(self) -> None:
        """Applies the rules in force. Keeps entries that the program itself added."""
        restricted = self._restricted()
        wanted = {**self._ordinary, **restricted, **self._added}
        for name in self._placed - set(wanted):
            self.names.pop(name, None)
        self.names.update(wanted)
        self._placed = set(wanted)
        self.hooks.on_rules(self._given(restricted))

    def _restricted(self) -> dict[str, Any]:
        refused = self.enforcer.rules.refused
        restricted: dict[str, Any] = {}
        if not refused:
            return restricted
        if refused & _HOOKED:
            restricted.update(self.hooks.builtins())
        elif "foreign_modules" in refused:
            restricted["getattr"] = self.hooks.foreign_getattr()
        if "foreign_modules" in refused:
            restricted["vars"] = self.hooks.foreign_vars()
        for name, value in self._ordinary.items():
            rule = _rule_of(name, value)
            if rule in refused:
                restricted[name] = _Refused(self.enforcer, rule, name)
        return restricted

    def _given(self, restricted: dict[str, Any]) -> list[tuple[Any, Any]]:
        """Returns pairs of an object that a library may hold, and the one that agent code gets in its place."""
        if not self.enforcer.rules.refused:
            return []
        changed = {**self._ordinary, **restricted}
        given = [
            (real, changed[name])
            for name, real in vars(builtins).items()
            if callable(real) and name not in _IMPORTS and changed[name] is not real
        ]
        return [(builtins, self._ordinary[AGENT_BUILTINS]), *given]


def _rule_of(name: str, value: Any) -> str:
    """Returns the rule that refuses this builtin if it is in force; empty if no rule does."""
    if name in RUNNERS:
        return "dynamic_code"
    if name in NAMESPACES:
        return "namespaces"
    if name == "open":
        return "open"
    if (
        name in LISTED_BUILTINS
        or name == "get_ipython"
        or name.startswith("_")
        or name in _IMPORTS
        or not callable(value)
    ):
        return ""
    return "" if isinstance(value, type) and issubclass(value, BaseException) else "unlisted_builtins"


class _Refused:
    """A builtin that may not be used."""

    def __init__(self, enforcer: RuleEnforcer, rule: str, name: str) -> None:
        self._enforcer = enforcer
        self._rule = rule
        self.__name__ = self.__qualname__ = name

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        self._enforcer.refuse(PolicyDenied(self._rule, f"Builtin {self.__name__}"))

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself asks for these
        self._refuse()

    def __or__(self, other: Any) -> Any:
        return self  # part of an annotation

    __ror__ = __getitem__ = __or__

    def __repr__(self) -> str:
        return f"<builtin {self.__name__}, refused by language.{self._rule}>"


class _AgentBuiltins(ModuleType):
    """The module that `import builtins` gives to agent code: its own builtins, which it may read and change."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        super().__init__("builtins", builtins.__doc__)
        object.__setattr__(self, "_namespace", namespace)

    def __getattribute__(self, name: str) -> Any:
        namespace = object.__getattribute__(self, "_namespace")
        if name == "__import__":
            return namespace[CALLED_IMPORT]  # `__import__` itself serves import statements
        if name == "__dict__":
            return namespace
        return namespace[name] if name in namespace else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "_namespace")[name] = value

    def __delattr__(self, name: str) -> None:
        if object.__getattribute__(self, "_namespace").pop(name, self) is self:
            raise AttributeError(name)

    def __dir__(self) -> list[str]:
        return sorted(name for name in object.__getattribute__(self, "_namespace") if name.isidentifier())


class Instrumenter:
    """Makes checked, instrumented code from a source or a syntax tree."""

    def __init__(self, enforcer: RuleEnforcer, sentinels: Sentinels, constants: dict[bytes, object]) -> None:
        self._enforcer = enforcer
        self._sentinels = sentinels
        self._constants = constants

    def make(
        self,
        source: Any,
        filename: Any,
        mode: str,
        flags: int = 0,
        optimize: int = -1,
        package: Optional[str] = None,
        **hidden: Any,
    ) -> CodeType:
        """`package` is given for the program's own modules; it is empty for a module outside packages."""
        if isinstance(source, ast.AST):
            from copy import deepcopy  # not at the start: it imports weakref, 0.1 MiB

            tree = deepcopy(source)  # the program may use its own again
        else:
            tree = _compile(source, filename, mode, flags | ast.PyCF_ONLY_AST, True, optimize, **hidden)
        rules = self._enforcer.rules
        for line, module in Imports(tree, rules, self._enforcer.own, package).denied[:1]:
            self._enforcer.refuse(ImportDenied(module, rules, _place(filename, line, package)))
        for line, rule, what in find_refused(tree, rules)[:1] if rules.refused else ():
            self._enforcer.refuse(PolicyDenied(rule, what, _place(filename, line, package)))
        instrument(
            tree, self._sentinels, rules=rules, string_annotations=bool(flags & future.annotations.compiler_flag)
        )
        return bind(compile_tree(tree, filename, mode, flags=flags, optimize=optimize), self._constants)


def _place(filename: Any, line: int, package: Optional[str]) -> str:
    """Returns the place of a refusal in a module, for its message. The program sees the lines of its own text."""
    return "" if package is None else f" ({filename}, line {line})"


def _make_compile(instrumenter: Instrumenter) -> Callable[..., Any]:
    def compile(
        source: Any,
        filename: Any,
        mode: str,
        flags: int = 0,
        dont_inherit: bool = False,
        optimize: int = -1,
        *,
        _feature_version: int = -1,
    ) -> Any:
        if not dont_inherit:
            flags |= _inherited(sys._getframe(1))
        if flags & ast.PyCF_ONLY_AST or mode not in ("exec", "eval", "single"):
            return _compile(source, filename, mode, flags, True, optimize, _feature_version=_feature_version)
        return instrumenter.make(source, filename, mode, flags, optimize, _feature_version=_feature_version)

    return compile


def _make_exec(instrumenter: Instrumenter, tick: Callable[[], bool], namespace: dict[str, Any]) -> Callable[..., None]:
    def exec(source: Any, /, globals: Any = None, locals: Any = None, **closure: Any) -> None:
        tick()  # straight-line code that runs itself again and again would spend nothing else
        frame = sys._getframe(1)
        closure = {name: value for name, value in closure.items() if value is not None}
        text = _text(source)
        if text is not None and not closure:  # otherwise the real function runs a code object, or raises
            source = instrumenter.make(text, "<string>", "exec", _inherited(frame))
        _exec(source, *_namespaces(globals, locals, frame, namespace), **closure)

    return exec


def _make_eval(instrumenter: Instrumenter, tick: Callable[[], bool], namespace: dict[str, Any]) -> Callable[..., Any]:
    def eval(source: Any, /, globals: Any = None, locals: Any = None) -> Any:
        tick()
        frame = sys._getframe(1)
        text = _text(source)
        if text is not None:
            text = text.lstrip(" \t") if isinstance(text, str) else text.lstrip(b" \t")
            source = instrumenter.make(text, "<string>", "eval", _inherited(frame))
        return _eval(source, *_namespaces(globals, locals, frame, namespace))

    return eval


def _text(source: Any) -> str | bytes | None:
    """Returns a source that is text or any buffer; None for anything else."""
    if isinstance(source, (str, bytes)):
        return source
    try:
        return memoryview(source).tobytes()
    except TypeError:
        return None


def _inherited(frame: FrameType) -> int:
    return frame.f_code.co_flags & _FUTURE_FLAGS


def _namespaces(globals: Any, locals: Any, frame: FrameType, namespace: dict[str, Any]) -> tuple[Any, Any]:
    """Returns globals and locals as CPython chooses them for exec and eval called in this frame."""
    if globals is not None:
        if isinstance(globals, dict):  # otherwise the real function raises
            globals["__builtins__"] = namespace
        return globals, globals if locals is None else locals
    return frame.f_globals, locals_of(frame) if locals is None else locals


def _make_input() -> Callable[..., str]:
    def input(prompt: object = "", /) -> str:
        """Reads a line of the program's own sys.stdin; without one, raises EOFError."""
        try:
            return _input(prompt)
        except EOFError as end:
            if getattr(sys.stdin, "name", None) != os.devnull:
                raise
            raise EOFError("input() is not available in the sandbox: there is nobody to answer") from end

    return input


def _breakpoint(*_: Any, **__: Any) -> None:
    raise RuntimeError("breakpoint() is not available in the sandbox: it has no debugger")


def _exit(code: Any = None) -> None:
    """Ends the program."""
    raise SystemExit(code)
