"""The in-memory interpreter: runs agent code in a thread of the tests' process, with variables that live on.

The source is checked and instrumented as in a real sandbox; what ends a program is raised by the meter in its loops and
calls, or by the stand-in of `time` where it sleeps. A thread can't be ended otherwise: a program that hangs in C stays.
"""

from __future__ import annotations

import asyncio
import builtins
import io
import linecache
import marshal
import secrets
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor_api.values import encode
from executor_server.guest.checks.checker import check
from executor_server.guest.checks.control import ControlException, ExecutionInterrupted, FinalAnswerGiven, Refusal
from executor_server.guest.checks.dynamic import agent_builtins
from executor_server.guest.checks.failures import describe, text_of
from executor_server.guest.checks.hooks import Hooks
from executor_server.guest.checks.imports import CALLED_IMPORT, check_import
from executor_server.guest.checks.instrumentation import LastValue, Sentinels, bind
from executor_server.guest.checks.meter import Meter, OperationLimitExceeded
from executor_server.guest.checks.rule_enforcer import RuleEnforcer
from executor_server.guest.checks.rules import Rules
from executor_server.guest.interpreter.guard import guard
from executor_server.guest.interpreter.host_tools import packed_arguments
from executor_server.guest.wire.messages import ErrorDetail

# Modules that only compute. Others could end, block or change the tests' own process.
IMPORTABLE = frozenset(
    [
        "asyncio",
        "base64",
        "bisect",
        "cmath",
        "collections",
        "contextlib",
        "copy",
        "dataclasses",
        "datetime",
        "decimal",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "json",
        "math",
        "numbers",
        "numpy",
        "operator",
        "random",
        "re",
        "statistics",
        "string",
        "textwrap",
        "typing",
        "uuid",
    ]
)
_CO_COROUTINE = 0x80
_WRITE_CHARS = 64 * 1024


class InterpreterEnded(ControlException):
    """The program called os._exit: its interpreter, with all variables, is gone."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(frozen=True)
class Grant:
    """A program's operations, and those at which to warn: limits by mark."""

    operations: int
    of_session: int | None
    marks: Mapping[int, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The end of a program, in the guest's words; with `died`, the interpreter ended with it."""

    outcome: str
    error: ErrorDetail | None
    operations: int
    output: bytes = b""
    imports: list[str] = field(default_factory=list)
    died: bool = False


class Ties:
    """The guest as a program sees it; all methods are called in the program's thread."""

    def __init__(
        self,
        write: Callable[[str, bytes], None],
        warn: Callable[[str], None],
        call: Callable[[str, bytes], Callable[[], Any]],
    ) -> None:
        self.write = write
        self.warn = warn
        self.call = call  # begins a call of a host tool; what it returns waits for the answer


class Interpreter:
    """One namespace. `run` is called in a thread, one at a time; `interrupt` from any other."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self._meter = Meter()
        self._enforcer = RuleEnforcer(self._meter)
        self._sentinels = Sentinels(secrets.token_hex(8))
        self._hooks = Hooks(self._enforcer)
        self._main = types.ModuleType("__main__")
        self._stopped = threading.Event()
        self._ties: Ties | None = None
        self._tools: frozenset[str] = frozenset()
        self._names = agent_builtins(
            enforcer=self._enforcer,
            meter=self._meter,
            guard=guard,
            sentinels=self._sentinels,
            hooks=self._hooks,
            imported=lambda module: None,
        )
        self._modules = self._stand_ins()
        self._names["__import__"] = self._limited(self._names["__import__"])
        self._names[CALLED_IMPORT] = self._limited(self._names[CALLED_IMPORT])
        self._names["print"], self._names["open"] = self._print, self._open
        self._main.__dict__["__builtins__"] = self._names

    @property
    def variables(self) -> dict[str, Any]:
        return self._main.__dict__

    def set_rules(self, rules: Rules) -> None:
        self._enforcer.rules = rules

    def set_tools(self, names: frozenset[str]) -> None:
        """These are callable by name; agent code's own variables of such names go."""
        for name in self._tools - names:
            self._names.pop(name, None)
        for name in names:
            self._main.__dict__.pop(name, None)
            self._names[name] = self._stub(name)
        self._tools = names

    def interrupt(self) -> None:
        """The program ends where it next ticks or sleeps."""
        self._stopped.set()
        self._meter.stop(ExecutionInterrupted)

    # -- in the program's thread

    def run(
        self, source: str, filename: str, mode: str, grant: Grant, ties: Ties, started: Callable[[], None]
    ) -> Ended:
        """Checks a source and runs it; never raises. `started` is called between the two."""
        verdict = check(source, filename, rules=self._enforcer.rules, output_mode=mode, sentinels=self._sentinels)
        imports = list(verdict.imports)
        if verdict.code is None:
            return Ended(verdict.outcome, verdict.error, 0, imports=imports)
        code, spans = marshal.loads(verdict.code)
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        last = LastValue()
        constants = self._sentinels.constants(ticks=self._meter.ticks, guard=guard, keep=last, hooks=self._hooks)
        calls = {mark: lambda names=names: _each(ties.warn, names) for mark, names in grant.marks.items()}
        self._ties = ties
        self._stopped.clear()
        self._meter.start(grant.operations, calls, grant.of_session)
        self._enforcer.begin()
        started()
        output = b""
        failed: BaseException | None = None
        try:
            self._evaluate(bind(code, constants))
            output = encode(last.value) if last.value is not None else b""
        except FinalAnswerGiven:
            pass
        except BaseException as raised:  # noqa: BLE001 - the border of agent code
            failed = raised
        failed = self._enforcer.refusal or self._meter.raised or failed
        self._enforcer.end()
        operations = self._meter.finish()
        self._ties = None
        if failed is None:
            return Ended("succeeded", None, operations, output, imports)
        outcome, error = _classified(failed, filename, source, spans)
        return Ended(outcome, error, operations, imports=imports, died=isinstance(failed, InterpreterEnded))

    def _evaluate(self, code: types.CodeType) -> None:
        self._main.__dict__["__builtins__"] = self._names
        result = eval(code, self._main.__dict__)
        if code.co_flags & _CO_COROUTINE:
            asyncio.run(result)

    def _stub(self, name: str) -> Callable[..., Any]:
        def tool(*args: Any, **kwargs: Any) -> Any:
            if self._ties is None:
                raise RuntimeError("no execution is running that could call a tool")
            answer = self._ties.call(name, packed_arguments(name, args, kwargs, final=False))()
            if self._stopped.is_set():
                raise ExecutionInterrupted
            return answer

        tool.__name__ = tool.__qualname__ = name
        return tool

    # -- what stands in for what a sandbox would confine

    def _stand_ins(self) -> dict[str, types.ModuleType]:
        stdout, stderr = _Stream("stdout", self), _Stream("stderr", self)
        return {
            "os": _module(
                "os", _exit=_end_interpreter, path=_module("os.path", exists=self._exists), listdir=self._listdir
            ),
            "sys": _module("sys", stdout=stdout, stderr=stderr, version_info=sys.version_info),
            "time": _module(
                "time", sleep=self._sleep, time=time.time, monotonic=time.monotonic, perf_counter=time.perf_counter
            ),
        }

    def _limited(self, checked: Callable[..., Any]) -> Callable[..., Any]:
        def __import__(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            if name in self._modules:
                check_import(self._enforcer, name, fromlist, level)
                return self._modules[name]
            by_a_library = type(fromlist) is list and not fromlist and globals is not None and globals is locals
            if not by_a_library and name.partition(".")[0] not in IMPORTABLE | {"builtins"}:
                check_import(self._enforcer, name, fromlist, level)
                raise ModuleNotFoundError(f"the in-memory fake has no module named {name!r}", name=name)
            return checked(name, globals, locals, fromlist, level)

        return __import__

    def _sleep(self, seconds: float) -> None:
        if self._stopped.wait(min(seconds, threading.TIMEOUT_MAX)):
            raise ExecutionInterrupted

    def _print(
        self, *values: object, sep: str | None = None, end: str | None = None, file: Any = None, flush: bool = False
    ) -> None:
        stream = self._modules["sys"].stdout if file is None else file
        builtins.print(*values, sep=sep, end=end, file=stream, flush=flush)

    def _open(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        """Opens files of the workspace only: no wall is around this program, and other files are the host's."""
        return self._inside(path).open(*args, **kwargs)

    def _exists(self, path: Any) -> bool:
        return self._inside(path).exists()

    def _listdir(self, path: Any = ".") -> list[str]:
        return [entry.name for entry in self._inside(path).iterdir()]

    def _inside(self, path: Any) -> Path:
        target = (self._workspace / str(path)).resolve()
        if not target.is_relative_to(self._workspace):
            raise PermissionError(f"{path!s} is not in the workspace")
        return target

    def write(self, stream: str, text: str) -> None:
        ties = self._ties
        for start in range(0, len(text) if ties is not None else 0, _WRITE_CHARS):
            if self._stopped.is_set():
                raise ExecutionInterrupted
            assert ties is not None
            ties.write(stream, text[start : start + _WRITE_CHARS].encode("utf-8", "backslashreplace"))


class _Stream(io.TextIOBase):
    """A program's stdout or stderr, whichever program it is by now."""

    encoding = "utf-8"

    def __init__(self, name: str, interpreter: Interpreter) -> None:
        super().__init__()
        self._name = name
        self._interpreter = interpreter

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._interpreter.write(self._name, text)
        return len(text)


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(members)
    return module


def _end_interpreter(code: int) -> None:
    raise InterpreterEnded(code)


def _each(function: Callable[[str], None], names: list[str]) -> None:
    for name in names:
        function(name)


def _classified(failed: BaseException, filename: str, source: str, spans: list[list[int]]) -> tuple[str, ErrorDetail]:
    if isinstance(failed, InterpreterEnded):
        message = f"the program ended its interpreter with exit code {failed.code}"
        return "exited", ErrorDetail(type="SystemExit", message=message, exit_code=failed.code & 0xFF)
    if isinstance(failed, SystemExit):
        code = failed.code if isinstance(failed.code, int) else int(failed.code is not None)
        return "exited", ErrorDetail(type="SystemExit", message=text_of(failed), exit_code=code & 0xFF)
    detail = describe(failed, filename, source, spans)
    if isinstance(failed, OperationLimitExceeded):
        return "operation_limit", detail
    if isinstance(failed, Refusal):
        return failed.outcome, detail
    return "exception", detail
