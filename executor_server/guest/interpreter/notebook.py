"""What notebooks expect of IPython: `get_ipython()`, and the module IPython.display where IPython is missing.

A command needs the authorization to import `subprocess`; the audit hook enforces the rule on processes. Everything else
runs as the agent's own code, with the agent's own builtins.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from time import perf_counter, process_time

from ..checks.hooks import locals_of
from ..checks.imports import check_import
from ..checks.own_modules import NOTEBOOK_MODULES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType, ModuleType
    from typing import Any, Iterator, Optional

    from ..checks.rules import RuleEnforcer

_ROUNDS, _ROUND_S = 5, 0.02  # short, as each turn counts as an operation
_FIELD = r"\{\{|\}\}|\$\$|(?<!\$)\{([^{}\n]+)\}|\$([^\W\d]\w*)"
_agent: list[tuple[dict[str, Any], RuleEnforcer]] = []  # not on the object, which the program can read


class Notebook:
    """The result of `get_ipython()`, for translated code (checks/magics.py) and exported notebooks.

    It also finds and loads the modules that stand for IPython's.
    """

    def __init__(self, names: dict[str, Any], enforcer: RuleEnforcer) -> None:
        """`names` are the builtins of agent code."""
        _agent[:] = [(names, enforcer)]
        self._step: Optional[Timing] = None
        self.last_exc: Optional[BaseException] = None
        """The exception of the last program whose message was cut. `str` of it gives the whole message."""
        names["get_ipython"] = lambda: self
        sys.meta_path.append(self)

    @property
    def os(self) -> ModuleType:
        check_import(_agent[0][1], "os")
        return sys.modules["os"]

    def system(self, command: str) -> None:
        """Runs a command; its output joins the program's."""
        _run(_expanded(command, sys._getframe(1)))

    def getoutput(self, command: str) -> list[str]:
        """Runs a command, and returns the lines that it prints."""
        output: bytes = _run(_expanded(command, sys._getframe(1)), captures=True).stdout
        return output.decode("utf-8", "replace").splitlines()

    def expanded(self, text: str) -> str:
        return _expanded(text, sys._getframe(1))

    def script(self, shell: str, text: str, options: str) -> None:
        import shlex

        takes, *given = shlex.split(options) or ["-s"]
        if takes != "-s":
            raise ValueError(f"%%{shell} takes only -s ARGUMENTS here, not {takes}")
        _run(text, shell, *given).check_returncode()

    def run_line_magic(self, name: str, line: str) -> None:
        _execute(f"%{name} {line}", sys._getframe(1))

    def run_cell_magic(self, name: str, line: str, cell: str) -> None:
        _execute(f"%%{name} {line}\n{cell}", sys._getframe(1))

    def help(self, item: Any, with_source: bool) -> None:
        import inspect

        try:
            about = inspect.getsource(item) if with_source else f"{item.__name__}{inspect.signature(item)}"
        except (AttributeError, OSError, TypeError, ValueError):
            about = f"a {type(item).__name__}"
        print(about, inspect.getdoc(item) or "It has no documentation.", sep="\n")

    def timing(self) -> Timing:
        return Timing()

    def time_step(self) -> None:
        """Makes the execution print its times at its end."""
        self._step = Timing()

    def end_step(self) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.shown(None)

    def timeit(self, options: str) -> Iterator[None]:
        """Yields for each measured turn, and prints the shortest time."""
        import re

        given = dict(re.findall(r"-([nr])\s*(\d+)", options))
        turns, rounds = max(1, int(given.get("n", 1))), max(1, int(given.get("r", _ROUNDS)))
        times: list[float] = []
        while len(times) < rounds:
            started = perf_counter()
            for _ in range(turns):
                yield
            taken = perf_counter() - started
            if "n" not in given and taken < _ROUND_S and not times:
                turns *= 2
            else:
                times.append(taken / turns)
        print(f"{_span(min(times))} per loop (best of {rounds} runs, {turns:,} loops each)")

    # -- modules

    def find_spec(self, name: str, _path: Any = None, _target: Any = None) -> Optional[ModuleSpec]:
        if name not in NOTEBOOK_MODULES:
            return None
        return ModuleSpec(name, self, is_package=not name.endswith("display"))  # type: ignore[arg-type]

    def create_module(self, _spec: ModuleSpec) -> None:
        """Lets Python make a plain module."""

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "IPython":
            __import__("IPython.display")
            # Libraries find IPython but no notebook: they would expect more of one than there is here.
            getter = lambda: self if sys._getframe(1).f_builtins is _agent[0][0] else None  # noqa: E731
            vars(module).update(get_ipython=getter, version_info=(9, 0, 0), __version__="9.0.0")
        elif module.__name__.endswith("display"):
            from . import notebook_display

            vars(module).update(notebook_display.names(_agent[0][0]))


class Timing:
    """Prints the times from its creation to its end."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = perf_counter(), process_time()

    def shown(self, value: Any) -> Any:
        """Prints the times; returns the value that they were spent on."""
        wall_s, cpu_s = perf_counter() - self._wall_s, process_time() - self._cpu_s
        print(f"CPU times: total: {_span(cpu_s)}\nWall time: {_span(wall_s)}")
        return value

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(self, *_: Any) -> None:
        self.shown(None)


def _span(time_s: float) -> str:
    for unit, parts in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if time_s * parts >= 1:
            return f"{time_s * parts:.3g} {unit}"
    return f"{time_s * 1e9:.3g} ns"


def _run(command: str, shell: str = "bash", *given: str, captures: bool = False) -> Any:
    check_import(_agent[0][1], "subprocess")
    import shutil
    import subprocess

    sys.stdout.flush()
    stdout, stderr = (subprocess.PIPE, subprocess.STDOUT) if captures else (None, None)
    return subprocess.run(
        [shutil.which(shell) or "sh", "-c", command, shell, *given], check=False, stdout=stdout, stderr=stderr
    )


def _expanded(command: str, frame: FrameType) -> str:
    """Puts values in place of `{expression}` and `$name`. Anything else is left for the shell."""
    import re
    from string import Formatter

    names = {**frame.f_globals, **locals_of(frame)}

    def value(found: re.Match[str]) -> str:
        expression = found[1] or found[2]
        if expression is None:
            return found[0][0]
        try:
            form, conversion = "", None
            if found[1]:  # as str.format has it: {x:.2f}
                _, field, spec, conversion = next(iter(Formatter().parse(found[0])))
                expression, form = field or "", spec or ""
            compile(expression.strip(), "", "eval")  # otherwise it is not an expression, and rules might refuse it
            made = names[expression] if expression.isidentifier() else _agent[0][0]["eval"](expression, names)
            if form or conversion:
                return str(Formatter().format_field(Formatter().convert_field(made, conversion), form))
        except Exception:  # noqa: BLE001 (agent code)
            return found[0]
        return found[0] if type(made) is tuple else str(made)  # {a,b} are alternatives for the shell

    return re.sub(_FIELD, value, command)


def _execute(text: str, frame: FrameType) -> None:
    from ..checks import magics

    python, changed = magics.translate(text, "<magic>")
    if not changed:
        raise NameError(magics.explanation(text))
    _agent[0][0]["exec"](python, frame.f_globals, locals_of(frame))
