"""A program of `executor run`, which behaves like `python`: its files, and the code that launches it in the sandbox.

The launcher reads the program, sets `sys.argv`, `__file__` and standard input, and ends like `python`: it waits for
threads, runs `atexit` functions, and prints tracebacks without our frames. If the policy refuses what the launcher
needs, the program runs without it, with `sys.argv` only.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from executor_client.errors import FileError, InvalidRequest, PolicyViolationError
from executor_client.results import ExecutionResult, SessionInfo
from executor_client.session import Session

WORKSPACE = "/workspace"
FILES_MAX = 2_000
"""Limit of the Python files that are copied with a script."""

_STDIN_TOOL = "read_standard_input"
_NEEDED_IMPORTS = {"atexit", "io", "os", "sys", "threading", "traceback"}
_NEEDED_LANGUAGE = {"dunder_access", "dynamic_code", "module_attributes", "namespaces", "open", "unlisted_builtins"}
_IMPORTS = re.compile(r'^[ \t"]*(from|import)[ \t]+([\w., \t]+)', re.MULTILINE)
_OUR_FRAMES = re.compile(r'^  File "<execution-\d+>".*\n(?:    .*\n)*', re.MULTILINE)
_LAUNCHER = """\
def _launch(filename, source, argv, directory, has_input, is_last):
    import atexit, io, os, sys, threading, traceback
    names = globals()
    del names["_launch"]
    sys.argv[:] = argv
    sys.path.insert(0, directory)
    if has_input:
        class Input(io.RawIOBase):
            def readable(self):
                return True
            def readinto(self, buffer):
                data = read_standard_input(len(buffer))
                buffer[: len(data)] = data
                return len(data)
        sys.stdin = io.TextIOWrapper(io.BufferedReader(Input()), "utf-8")
    status = 0
    try:
        if source is None:
            names["__file__"] = filename
            with open(filename, "rb") as file:
                source = file.read()
        exec(compile(source, filename, "exec", dont_inherit=True), names)
    except SystemExit as end:
        status = end.code
        if status is not None and not isinstance(status, int):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != filename:
            trace = trace.tb_next
        each = trace
        while each is not None:
            if each.tb_next is not None and "/executor_guest/" in each.tb_next.tb_frame.f_code.co_filename:
                each.tb_next = each.tb_next.tb_next
            else:
                each = each.tb_next
        traceback.print_exception(type(error), error, trace)
        status = 1
    if is_last:
        threading._shutdown()
        atexit._run_exitfuncs()
    if status:
        raise SystemExit(status)
_launch(*{arguments})
"""


@dataclass
class Script:
    """A program: its text or file, and its arguments. `files` maps workspace paths to local files."""

    argv: list[str]
    source: str
    path: str = ""
    """The path of its file in the workspace; empty without a file."""
    files: dict[str, Path] = field(default_factory=dict)
    launches: bool = False
    """True if the launcher runs it, which prints tracebacks like `python`."""

    @property
    def cells(self) -> bool:
        """True for a notebook, whose cells run one after another and show their values."""
        return self.path.endswith(".ipynb")

    def put_files(self, session: Session) -> None:
        for path, local in self.files.items():
            try:
                if local.is_dir():
                    session.files.put_directory(local, path)
                else:
                    session.files.put(local, path)
            except FileError:
                raise
            except OSError as error:
                raise InvalidRequest(f"{local} cannot be read: {error}") from error

    def steps(self, session: Session, *, is_last: bool) -> list[str]:
        """Returns the code to execute. With `is_last`, it ends like a process and can read our standard input."""
        if self.cells:
            return _cells(self.source, self.argv[0])
        self.launches = _may_launch(session.info)
        if not self.launches:
            arguments = [f"import sys\nsys.argv = {self.argv!r}"] if self.argv[1:] else []
            return [*arguments, self.source]
        has_input = is_last and self.argv[0] != "-" and _serve_input(session)
        filename = f"{WORKSPACE}/{self.path}" if self.path else "<stdin>" if self.argv[0] == "-" else "<string>"
        directory = filename.rpartition("/")[0] if self.path else ""
        given = (filename, None if self.path else self.source, self.argv, directory, has_input, is_last)
        return [_LAUNCHER.replace("{arguments}", repr(given))]

    def described(self, result: ExecutionResult) -> ExecutionResult:
        """Returns the result without the launcher's frames in its traceback."""
        if result.error is None or not self.launches:
            return result
        return replace(result, error=replace(result.error, traceback=_OUR_FRAMES.sub("", result.error.traceback)))


def _may_launch(info: SessionInfo) -> bool:
    refused = {*info.denied_imports, *info.refused_language}
    return "*" in info.authorized_imports and refused.isdisjoint(_NEEDED_IMPORTS | _NEEDED_LANGUAGE)


def with_files(name: str, source: str, arguments: list[str], put: Iterable[Path]) -> Script:
    """Returns the script of a local file, with Python files of its directory and local files among its arguments."""
    local = Path(name)
    script = Script([name], source, _place(local))
    above = PurePosixPath(script.path).parent
    for each in _neighbours(local):
        script.files[str(above / each.relative_to(local.parent))] = each
    script.files[script.path] = local
    for argument in arguments:
        option, equals, value = argument.rpartition("=")
        if value and Path(value).is_file():
            script.files[_place(Path(value))] = Path(value)
            argument = f"{option}{equals}{value if _is_below(Path(value)) else _place(Path(value))}"
        script.argv.append(argument)
    script.files |= placed(put)
    return script


def placed(put: Iterable[Path]) -> dict[str, Path]:
    """Returns local files by their workspace paths."""
    return {_place(each): each for each in put}


def _place(path: Path) -> str:
    """Returns the workspace path of a local file. The workspace stands for the current directory."""
    return os.path.relpath(path) if _is_below(path) else path.name


def _is_below(path: Path) -> bool:
    return not path.is_absolute() and not os.path.relpath(path).startswith("..")


def _neighbours(script: Path) -> Iterator[Path]:
    """Yields the Python files in a script's directory, and those of imported packages in it.

    Leaves out hidden ones, such as the locks of editors, and unreadable ones that nothing imports. Raises
    InvalidRequest for more than FILES_MAX.
    """
    files = _python_files(script.parent.glob("*.py"), script.parent)
    texts = {each: _text(each) for each in (script, *files[:FILES_MAX])}
    imported = {name for text in texts.values() if text is not None for name in _imported(text)}
    files = [each for each in files if each.stem in imported or texts.get(each, "") is not None]
    for name in sorted(imported):
        files += _python_files((script.parent / name).rglob("*.py"), script.parent)
    if len(files) > FILES_MAX:
        raise InvalidRequest(
            f"the directory of {script} has more than {FILES_MAX} Python files; move the script to its own directory"
        )
    yield from files


def _python_files(found: Iterable[Path], directory: Path) -> list[Path]:
    files = (each for each in found if not any(part.startswith(".") for part in each.relative_to(directory).parts))
    return sorted(each for each in files if os.path.isfile(each))  # noqa: PTH113 -- Path.is_file raises some errors


def _imported(text: str) -> Iterator[str]:
    """Yields the first parts of the names of imported modules, as far as a line has them."""
    for kind, names in _IMPORTS.findall(text):
        for name in names.split(",") if kind == "import" else [names]:
            if first := re.match(r"\s*(\w+)", name):
                yield first[1]


def _text(path: Path) -> str | None:
    """Returns the text of a Python file, None if it can't be read."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None


def _serve_input(session: Session) -> bool:
    """Lets the program read our standard input. Returns False if the policy refuses tools."""

    def read_standard_input(size: int) -> bytes:
        buffer: Any = getattr(sys.stdin, "buffer", None)
        return buffer.read1(min(size, 65_536)) if buffer is not None else b""

    try:
        session.register_tools({_STDIN_TOOL: read_standard_input})
    except PolicyViolationError:
        return False
    return True


def _cells(text: str, name: str) -> list[str]:
    """Returns the sources of a notebook's code cells. Raises InvalidRequest if it is not a notebook."""
    try:
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return ["".join(cell["source"]) for cell in cells]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"{name} is not a notebook: {error}") from error
