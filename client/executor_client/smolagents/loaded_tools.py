"""Keeps the source of tools that smolagents loaded from saved code.

smolagents runs the code of a saved tool and discards it. Tracebacks, and shipping the tool into a sandbox, need its
source. It is put into `linecache`, where Python keeps the lines of interactive code.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import linecache
import types
from collections.abc import Iterator
from typing import Any

_NO_FILE = "<string>"
# exec() in smolagents' module passes this flag on to the code, even if the code has no such import itself.
_QUOTED_ANNOTATIONS = __future__.annotations.compiler_flag


def remember_source(tool: Any, code: str) -> None:
    """Registers `code`, from which smolagents made `tool`, as the tool's source. Idempotent."""
    filename = f"<tool {hashlib.sha256(code.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    inherited = 0 if _quotes_annotations(code) else _QUOTED_ANNOTATIONS
    for function in _functions(type(tool)):
        code_object = function.__code__
        if code_object.co_filename == _NO_FILE:
            flags = code_object.co_flags & ~inherited
            function.__code__ = code_object.replace(co_filename=filename, co_flags=flags)


def _quotes_annotations(code: str) -> bool:
    imports = (each for each in ast.parse(code).body if isinstance(each, ast.ImportFrom))
    return any(name.name == "annotations" for each in imports if each.module == "__future__" for name in each.names)


def _functions(tool_class: type) -> Iterator[types.FunctionType]:
    """Yields the functions that the code defined at its top level and in its class bodies."""
    namespace = getattr(tool_class.forward, "__globals__", {})  # type: ignore[attr-defined]
    for value in list(namespace.values()):
        members = vars(value).values() if isinstance(value, type) and value.__module__ == tool_class.__module__ else ()
        for each in (value, *members):
            function = each.__func__ if isinstance(each, staticmethod | classmethod) else each
            accessors = (each.fget, each.fset, each.fdel) if isinstance(each, property) else ()
            for found in (function, *accessors):
                if isinstance(found, types.FunctionType) and found.__globals__ is namespace:
                    yield found
