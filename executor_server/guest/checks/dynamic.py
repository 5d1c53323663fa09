"""The builtins of agent code: Python's own, except those that run text, import, or wait for a person.

`exec`, `eval` and `compile` check the imports of their source and instrument it, as the checker does with the program
itself, so that a string can't evade the import rules or the operation budget. They behave like CPython's: the caller's
namespaces by default, the caller's `__future__` flags. One difference: a namespace passed to them always gets the
agent's `__builtins__`, because the checked `__import__` is among those.

References are taken when this module is imported, before any agent code runs.
"""

from __future__ import annotations
import __future__ as future

import ast
import builtins
import os
import sys
from types import CodeType, FrameType, ModuleType

from .imports import CALLED_IMPORT, ImportDenied, Imports, make_import, make_statement_import
from .instrumentation import Sentinels, bind, compile_tree, instrument
from .language import PolicyDenied, find_refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Iterator, Optional, Protocol

    from .hooks import Hooks
    from .rule_enforcer import RuleEnforcer

    class _Ticking(Protocol):
        """The part of a Meter that is used here."""

        ticks: Iterator[bool]
        tick: Callable[[], bool]


_exec, _eval, _compile, _input = builtins.exec, builtins.eval, builtins.compile, builtins.input

# The key under which the builtins of agent code keep the module that `import builtins` returns.
AGENT_BUILTINS = "builtins()"

_FUTURE_FLAGS = 0
for _name in future.all_feature_names:
    _FUTURE_FLAGS |= getattr(future, _name).compiler_flag
_CO_OPTIMIZED = 0x1


def agent_builtins(
    *,
    enforcer: RuleEnforcer,
    meter: _Ticking,
    guard: Callable[[], object],
    sentinels: Sentinels,
    hooks: Hooks,
    imported: Callable[[str], object],
) -> dict[str, Any]:
    """Returns a new dict for `__builtins__` of agent code; `imported` is called with each module that it imports."""
    instrumenter = Instrumenter(enforcer, sentinels, sentinels.constants(ticks=meter.ticks, guard=guard, hooks=hooks))
    namespace = dict(vars(builtins))
    module = _AgentBuiltins(namespace)

    def given(result: Any, name: str, names: Any) -> Any:
        imported(name)
        for each in names or ():
            imported(f"{name}.{each}")
        return module if result is builtins else result

    namespace[CALLED_IMPORT] = called = make_import(enforcer, given)
    namespace[AGENT_BUILTINS] = module
    namespace["__import__"] = make_statement_import(called, hooks.members, builtins.__import__)
    namespace["compile"] = _make_compile(instrumenter)
    namespace["exec"] = _make_exec(instrumenter, meter.tick, namespace)
    namespace["eval"] = _make_eval(instrumenter, meter.tick, namespace)
    namespace["input"] = _make_input()
    namespace["breakpoint"] = _breakpoint
    namespace["exit"] = namespace["quit"] = _exit
    return namespace


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

    def __call__(
        self, source: Any, filename: Any, mode: str, flags: int = 0, optimize: int = -1, **hidden: Any
    ) -> CodeType:
        return self._make(source, filename, mode, flags, optimize, None, **hidden)

    def of_module(self, source: bytes, path: str, package: str) -> CodeType:
        """Makes the code of a module of the program's own, which is in this package, if any."""
        return self._make(source, path, "exec", 0, -1, package)

    def _make(
        self, source: Any, filename: Any, mode: str, flags: int, optimize: int, package: Optional[str], **hidden: Any
    ) -> CodeType:
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
        return instrumenter(source, filename, mode, flags, optimize, _feature_version=_feature_version)

    return compile


def _make_exec(instrumenter: Instrumenter, tick: Callable[[], bool], namespace: dict[str, Any]) -> Callable[..., None]:
    def exec(source: Any, /, globals: Any = None, locals: Any = None, **closure: Any) -> None:
        tick()  # straight-line code that runs itself again and again would spend nothing else
        frame = sys._getframe(1)
        closure = {name: value for name, value in closure.items() if value is not None}
        text = _text(source)
        if text is not None and not closure:  # else the real function runs a code object, or says what is wrong
            source = instrumenter(text, "<string>", "exec", _inherited(frame))
        _exec(source, *_namespaces(globals, locals, frame, namespace), **closure)

    return exec


def _make_eval(instrumenter: Instrumenter, tick: Callable[[], bool], namespace: dict[str, Any]) -> Callable[..., Any]:
    def eval(source: Any, /, globals: Any = None, locals: Any = None) -> Any:
        tick()
        frame = sys._getframe(1)
        text = _text(source)
        if text is not None:
            text = text.lstrip(" \t") if isinstance(text, str) else text.lstrip(b" \t")
            source = instrumenter(text, "<string>", "eval", _inherited(frame))
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
        if isinstance(globals, dict):  # else the real function says what is wrong with it
            globals["__builtins__"] = namespace
        return globals, globals if locals is None else locals
    return frame.f_globals, locals_of(frame) if locals is None else locals


def locals_of(frame: FrameType) -> Any:
    """Returns what `locals()` gives in this frame."""
    if sys.version_info >= (3, 13) and frame.f_code.co_flags & _CO_OPTIMIZED:
        return dict(frame.f_locals)  # a snapshot, as exec takes one there; f_locals itself would write through
    return frame.f_locals


def _make_input() -> Callable[..., str]:
    def input(prompt: object = "", /) -> str:
        """Reads a line of the program's own sys.stdin; without one, the input is at its end."""
        try:
            return _input(prompt)
        except EOFError as end:
            if getattr(sys.stdin, "name", None) != os.devnull:
                raise
            raise EOFError("input() is not available in the sandbox: nobody answers here") from end

    return input


def _breakpoint(*_: Any, **__: Any) -> None:
    raise RuntimeError("breakpoint() is not available in the sandbox: there is no debugger here")


def _exit(code: Any = None) -> None:
    """Ends the program."""
    raise SystemExit(code)
