"""The asyncio client offers what the sync one does, name by name, parameter by parameter, default by default."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import executor_client
from executor_client import (
    AsyncExecutorClient,
    AsyncFileWatch,
    AsyncProcess,
    AsyncSession,
    AsyncSessionFiles,
    AsyncSessionProcesses,
    ExecutorClient,
    FileWatch,
    Process,
    Session,
    SessionFiles,
    SessionProcesses,
)
from executor_client.aio_undo import AsyncSessionUndo
from executor_client.undo import SessionUndo

ROOT = Path(__file__).parents[3]
PAIRS = [
    (ExecutorClient, AsyncExecutorClient),
    (Session, AsyncSession),
    (SessionFiles, AsyncSessionFiles),
    (SessionProcesses, AsyncSessionProcesses),
    (Process, AsyncProcess),
    (FileWatch, AsyncFileWatch),
]
MEMBERS = [
    pytest.param(blocking, asynchronous, name, id=f"{blocking.__name__}.{name}")
    for blocking, asynchronous in [*PAIRS, (SessionUndo, AsyncSessionUndo)]
    for name in sorted({*vars(blocking), *vars(asynchronous)})
    if not name.startswith("_")
]
AT_ONCE = {(AsyncProcess, "close"), (AsyncFileWatch, "close")}  # methods of the asyncio client that wait for nothing
DUNDERS = {"__iter__": "__aiter__", "__enter__": "__aenter__", "__exit__": "__aexit__"}


def parameters(function: Any) -> list[tuple[str, Any, Any, str]]:
    """Returns a function's parameters: names, kinds, defaults and annotations; those of the asyncio client in the words of the other."""
    return [
        (each.name, each.kind, each.default, _sync_words(each.annotation))
        for each in inspect.signature(function).parameters.values()
    ]


def _sync_words(annotation: Any) -> str:
    return (
        str(annotation)
        .replace("AsyncSession", "Session")
        .replace("AsyncProcess", "Process")
        .replace("AsyncFileWatch", "FileWatch")
        .replace("AsyncIterable", "Iterable")
    )


@pytest.mark.parametrize(("blocking", "asynchronous", "name"), MEMBERS)
def test_member_is_there_twice_and_the_same(blocking: type, asynchronous: type, name: str) -> None:
    one, other = vars(blocking).get(name), vars(asynchronous).get(name)
    assert one is not None and other is not None
    assert isinstance(one, property) is isinstance(other, property)
    one, other = getattr(one, "__func__", one), getattr(other, "__func__", other)
    if not isinstance(one, property):
        waits = (asynchronous, name) not in AT_ONCE
        assert inspect.iscoroutinefunction(other) is waits and not inspect.iscoroutinefunction(one)
        assert parameters(one) == parameters(other)
        assert _sync_words(inspect.signature(other).return_annotation) == str(inspect.signature(one).return_annotation)
        assert one.__doc__ and other.__doc__


@pytest.mark.parametrize(("blocking", "asynchronous"), PAIRS)
def test_both_are_made_and_entered_alike(blocking: type, asynchronous: type) -> None:
    made: list[list[Any]] = [
        [each for each in parameters(vars(kind)["__init__"]) if each[0] not in ("transport", "session")]
        for kind in (blocking, asynchronous)
    ]
    assert made[0] == made[1]
    assert blocking.__doc__ and asynchronous.__doc__
    special = {name for name in vars(blocking) if name in DUNDERS}
    assert {DUNDERS[name] for name in special} == {name for name in vars(asynchronous) if name in DUNDERS.values()}


def test_what_both_inherit_is_the_same() -> None:
    assert (Session.__mro__[1], AsyncSession.__mro__[1]) == (SessionUndo, AsyncSessionUndo)
    assert Session.__mro__[2:] == AsyncSession.__mro__[2:]


def test_blocking_client_is_what_the_asyncio_one_gives() -> None:
    command = [sys.executable, "tools/unasync.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_both_are_public() -> None:
    names = {kind.__name__ for pair in PAIRS for kind in pair}
    assert names <= set(executor_client.__all__)
    for name in executor_client.__all__:
        assert getattr(executor_client, name) is not None
