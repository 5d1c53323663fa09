"""Writes docs/client.md: every public name of the client, with its signature, from its docstring.

    python tools/client_docs.py [--check]

`--check` writes nothing, and fails when the page is not what would be written.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from pages import write_or_check

import executor_client
import executor_client.smolagents

TARGET = Path(__file__).parents[1] / "docs/client.md"
INTRODUCTION = Path(__file__).with_name("client_intro.md")

# A reader looks for what to call first, then for what comes back.
CHAPTERS: dict[str, tuple[str, ...]] = {
    "Clients": ("ExecutorClient", "AsyncExecutorClient", "TlsConfig"),
    "Sessions": ("Session", "SessionFiles", "Checkpoint", "Tool"),
    "Processes": ("SessionProcesses", "Process", "CompletedProcess", "ProcessResult", "TerminalSize"),
    "Results": ("ExecutionResult", "Outcome", "VariablesState", "ErrorDetail", "Usage", "Image"),
}
MIRRORS = {
    f"Async{name}": name for name in ("ExecutorClient", "Session", "SessionFiles", "SessionProcesses", "Process")
}


def document() -> str:
    """The page as it should be."""
    return INTRODUCTION.read_text() + "\n" + "\n".join(_page()).rstrip() + "\n"


def _page() -> Iterator[str]:
    names = list(executor_client.__all__)
    for title, listed in CHAPTERS.items():
        yield from _chapter(title, executor_client, listed)
        names = [name for name in names if name not in listed]
    kinds: dict[str, Callable[[Any], bool]] = {
        "Events": lambda value: getattr(value, "__module__", "") == "executor_client.events",
        "Errors": lambda value: isinstance(value, type) and issubclass(value, Exception),
        "Values": lambda value: getattr(value, "__module__", "").startswith("executor_api"),
        "The rest": lambda value: True,
    }
    for title, belongs in kinds.items():
        listed = tuple(name for name in names if belongs(getattr(executor_client, name)))
        yield from _chapter(title, executor_client, listed)
        names = [name for name in names if name not in listed]
    yield from _chapter("With smolagents", executor_client.smolagents, tuple(executor_client.smolagents.__all__))


def _chapter(title: str, module: Any, names: tuple[str, ...]) -> Iterator[str]:
    yield from (f"## {title}", "")
    if module is not executor_client:
        yield from (f"From `{module.__name__}`.", "")
    for name in names:
        yield from _entry(name, getattr(module, name))


def _entry(name: str, value: Any) -> Iterator[str]:
    yield from (f"### `{name}`", "")
    if name in MIRRORS:
        yield from (f"The same as `{MIRRORS[name]}`, on an event loop: its calls are awaited.", "")
        return
    if inspect.isclass(value) and value.__name__ != name and hasattr(executor_client.smolagents, value.__name__):
        yield from (f"Another name for `{value.__name__}`.", "")
        return
    if not (inspect.isclass(value) or inspect.isroutine(value)) or get_origin(value) is not None:
        yield from (_alias_text(value), "")
        return
    yield from _prose(value)
    if inspect.isroutine(value):
        yield from _code(f"{name}{_signature(value)}")
    elif issubclass(value, enum.Enum):
        yield from (" ".join(f"`{member.name}`" for member in value), "")
    elif dataclasses.is_dataclass(value):
        yield from _fields(value)
        yield from _members(value)
    else:
        if (
            value.__module__.startswith("executor")
            and not issubclass(value, BaseException)
            and _is_made_by_callers(value)
        ):
            yield from _code(f"{name}{_signature(value)}")
        yield from _members(value)


def _is_made_by_callers(value: type) -> bool:
    """True when it has a constructor for everybody. Sessions and their files are made by a client."""
    return "__init__" in vars(value) and "transport" not in inspect.signature(value).parameters


def _alias_text(value: Any) -> str:
    if get_args(value):
        return f"A type: `{str(value).replace('executor_client.', '').replace('collections.abc.', '')}`."
    return f"`{value!r}`."


def _fields(value: Any) -> Iterator[str]:
    yield from ("| Field | Type | Default |", "|---|---|---|")
    for field in dataclasses.fields(value):
        given = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "" if given else _default_text(field)
        kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        kind = kind.replace("|", "\\|")
        yield f"| `{field.name}` | `{kind}` | {default} |"
    yield ""


def _default_text(field: Any) -> str:
    if field.default is dataclasses.MISSING:
        return f"`{field.default_factory.__name__}()`"
    return f"`{field.default!r}`"


def _members(value: type) -> Iterator[str]:
    """Public methods and properties, those that are inherited of our own classes too, in the order of the source."""
    seen: set[str] = set()
    for owner in value.__mro__:
        if not owner.__module__.startswith(("executor_client", "executor_api")):
            continue
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if isinstance(member, property):
                yield from (f"**`.{name}`**", "", *_prose(member.fget))
            elif inspect.isfunction(member):
                yield from _code(f".{name}{_signature(member)}")
                yield from _prose(member)


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    kept = [each for name, each in signature.parameters.items() if name != "self"]
    inside = []
    for position, each in enumerate(kept):
        before = {other.kind for other in kept[:position]}
        if each.kind is each.KEYWORD_ONLY and not before & {each.KEYWORD_ONLY, each.VAR_POSITIONAL}:
            inside.append("*")
        inside.append(_parameter(each))
    returned = signature.return_annotation
    arrow = "" if returned in (signature.empty, "None") else f" -> {returned}"
    text = f"({', '.join(inside)}){arrow}"
    return text if len(text) <= 90 else "(\n" + "".join(f"    {each},\n" for each in inside) + f"){arrow}"


def _parameter(each: inspect.Parameter) -> str:
    stars = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
    kind = "" if each.annotation is each.empty else f": {each.annotation}"
    default = "" if each.default is each.empty else f" = {each.default!r}"
    return f"{stars}{each.name}{kind}{default}"


def _code(text: str) -> Iterator[str]:
    yield from ("```text", text, "```", "")


def _prose(value: Any) -> Iterator[str]:
    # A dataclass without a docstring is given its signature as one.
    text = inspect.cleandoc(value.__doc__ or "")  # its own: what smolagents says of a method stands with smolagents
    if text and not (inspect.isclass(value) and text.startswith(f"{value.__name__}(")):
        yield from (text, "")


if __name__ == "__main__":
    write_or_check(TARGET, document())
