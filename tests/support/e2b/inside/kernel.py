"""A small interpreter that keeps its variables: reads a request a line, writes its events a line each.

A request is `{"n": 1, "code": "...", "env_vars": {...}}`; each event carries the `n` of its request. Output of the
code, also from below Python, becomes events; the interpreter itself writes to a descriptor that the code does not
know.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import datetime
import io
import json
import linecache
import os
import re
import signal
import subprocess
import sys
import threading
import traceback
import types
from collections.abc import Iterable
from typing import Any

SHELL_LINE = re.compile(r"^(\s*)(?:!|%)(.*)$", re.MULTILINE)
READ_BYTES = 65_536
LINE_CHARS_MAX = 8_192
_FORMATS = {"html": "_repr_html_", "markdown": "_repr_markdown_", "svg": "_repr_svg_", "latex": "_repr_latex_"}
_BINARY_FORMATS = {"png": "_repr_png_", "jpeg": "_repr_jpeg_", "pdf": "_repr_pdf_"}


class Kernel:
    def __init__(self) -> None:
        self._out = os.dup(1)
        self._lock = threading.RLock()
        self._number = 0
        self._count = 0
        self._streams: list[Stream] = []
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._names = module.__dict__
        self._names.update(__builtins__=__builtins__, _shell=self._shell, display=self._display)

    def run(self, requests: Iterable[str]) -> None:
        for name, fd in (("stdout", 1), ("stderr", 2)):
            read, write = os.pipe()
            os.dup2(write, fd)
            os.close(write)
            threading.Thread(target=self._pump, args=(name, read), daemon=True).start()
            self._streams.append(Stream(self, name))
            setattr(sys, name, self._streams[-1])
        sys.stdin = io.StringIO()
        for line in requests:
            request = json.loads(line)
            self._number = request["n"]
            try:
                self._execute(request["code"], request.get("env_vars") or {})
            except KeyboardInterrupt as error:  # it came a moment late
                self._report(error)
            self._flush()
            self.emit("end_of_execution")

    def _flush(self) -> None:
        for stream in self._streams:
            stream.flush()

    def emit(self, kind: str, **fields: Any) -> None:
        data = (json.dumps({"n": self._number, "type": kind, **fields}) + "\n").encode()
        with self._lock:
            while data:
                data = data[os.write(self._out, data) :]

    def _pump(self, name: str, fd: int) -> None:
        while data := os.read(fd, READ_BYTES):
            self.write(name, data.decode(errors="replace"))

    def write(self, name: str, text: str) -> None:
        self.emit(name, text=text, timestamp=datetime.datetime.now(datetime.UTC).isoformat())

    def _execute(self, code: str, env_vars: dict[str, str]) -> None:
        self._count += 1
        self.emit("number_of_executions", execution_count=self._count)
        before = {name: os.environ.get(name) for name in env_vars}
        os.environ.update(env_vars)
        try:
            self._run(code)
        except BaseException as error:  # noqa: BLE001 - the program's, whatever it is
            self._report(error)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _run(self, code: str) -> None:
        name = f"<cell {self._count}>"
        try:
            tree = ast.parse(code, name)
        except SyntaxError:
            code = SHELL_LINE.sub(lambda found: f"{found[1]}_shell({found[2]!r})", code)
            tree = ast.parse(code, name)
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), self._names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), self._names)
            if value is not None:
                self._show(value, is_main_result=True)

    def _display(self, *values: Any) -> None:
        for value in values:
            self._show(value, is_main_result=False)

    def _show(self, value: Any, *, is_main_result: bool) -> None:
        self._flush()
        formats: dict[str, str] = {"text": repr(value)}
        for name, method in (*_FORMATS.items(), *_BINARY_FORMATS.items()):
            with contextlib.suppress(Exception):
                shown = getattr(value, method)()
                if isinstance(shown, bytes):
                    formats[name] = base64.b64encode(shown).decode()
                elif isinstance(shown, str):
                    formats[name] = shown
        if isinstance(value, str):
            formats["text"] = formats["text"][1:-1]
        self.emit("result", is_main_result=is_main_result, **formats)

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            command, shell=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        self.write("stdout", done.stdout.decode(errors="replace"))

    def _report(self, error: BaseException) -> None:
        self._flush()
        own = error.__traceback__
        while own is not None and not own.tb_frame.f_code.co_filename.startswith("<cell "):
            own = own.tb_next
        lines = traceback.format_exception(type(error), error, own)
        self.emit("error", name=type(error).__name__, value=str(error), traceback="".join(lines))


class Stream(io.TextIOBase):
    """The program's standard output or error."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self._kernel = kernel
        self._name = name
        self._line = ""  # the line that has no end yet

    def write(self, text: str) -> int:
        self._line += text
        if text.endswith("\n") or len(self._line) > LINE_CHARS_MAX:
            self.flush()
        return len(text)

    def flush(self) -> None:
        line, self._line = self._line, ""
        if line:
            self._kernel.write(self._name, line)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1 if self._name == "stdout" else 2


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    Kernel().run(requests)
