"""Changes libraries where they would not work in a sandbox.

`multiprocessing` can't spawn a process if `__main__` comes from no file: the child looks for its functions in vain, and
pools start children without end. So "spawn" and "forkserver" fork here, under their own names. `inspect` finds the
source of a class by the file of its module; here, by its program.

The egress proxy is named by environment variables, which urllib, requests, httpx, websockets, pip, git and curl read.
Of the widely used libraries for Python only aiohttp ignores them, unless each session is made with `trust_env=True`.
"""

from __future__ import annotations

import linecache
import sys
import types

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_PROGRAMS = ("<execution-", "<prelude>")
_adapted: set[str] = set()


def adapt(module: str) -> None:
    """Adapts the libraries that are loaded by now, each once. Called when the program has imported a module."""
    if module == "concurrent.futures" and sys.version_info >= (3, 14):
        import multiprocessing.context  # noqa: F401 - its pool of processes does so later, past any import of the program
    changes = (("multiprocessing.context", _fork_always), ("inspect", _find_classes))
    for name, change in (*changes, ("subprocess", _plain_flags), ("multiprocessing.util", _plain_flags)):
        loaded = sys.modules.get(name)
        if loaded is not None and name not in _adapted:
            _adapted.add(name)
            change(loaded)


def _fork_always(context: Any) -> None:
    contexts = context._concrete_contexts
    for name in ("spawn", "forkserver"):
        contexts[name] = type(name, (context.ForkContext,), {"_name": name})()
    context._default_context._default_context = contexts["fork"]


def _plain_flags(module: Any) -> None:
    """Lets new interpreters, such as joblib's, find the image's packages: -S and -I are only for this interpreter."""
    flags = module._args_from_interpreter_flags
    module._args_from_interpreter_flags = lambda: [
        each for each in flags() if each not in ("-S", "-I", "-s", "-E", "-P")
    ]


def _find_classes(inspect: Any) -> None:
    getfile = inspect.getfile
    lines: dict[str, Any] = linecache.cache

    def file_of(object: Any) -> str:
        try:
            return getfile(object)  # type: ignore[no-any-return]
        except (OSError, TypeError):
            if not isinstance(object, type) or object.__module__ != "__main__":
                raise
            import re  # not at the start of a sandbox

            functions = [each for each in vars(object).values() if isinstance(each, types.FunctionType)]
            named = [each.__code__.co_filename for each in functions]
            defined = re.compile(rf"^\s*class\s+{re.escape(object.__name__)}\b", re.MULTILINE)
            # Where no method names the program: the newest one that defines a class of this name.
            for name in (*named, *reversed(list(lines))):
                if name in lines and name.startswith(_PROGRAMS) and defined.search("".join(lines[name][2])):
                    return name
            raise

    inspect.getfile = file_of


def heed_proxy() -> None:
    """Makes `trust_env=True` the default of aiohttp's sessions, once the program or a library has imported it."""
    session = getattr(sys.modules.get("aiohttp"), "ClientSession", None)
    defaults = getattr(getattr(session, "__init__", None), "__kwdefaults__", None)
    if isinstance(defaults, dict) and "trust_env" in defaults:
        defaults["trust_env"] = True
