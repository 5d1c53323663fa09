"""The daemon and the client never unpickle, compile or run what they receive: audit hooks watch both at work.

An import compiles and runs too, so events of the import system itself are left out. Each watch must first see a planted
event.
"""

from __future__ import annotations

import ast
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from executor_api import values
from executor_api.v1 import executor_service_pb2 as service
from executor_api.v1 import types_pb2 as types
from executor_api.values.packing import pack
from executor_client import ExecutorClient, InvalidRequest, OpaqueValue, Outcome, Session
from tests.support import fake_daemon
from tests.support.attacks import LINK
from tests.support.backends import require
from tests.support.daemon import running_daemon

_FORBIDDEN = ("pickle.find_class", "marshal.loads", "compile", "exec")

_DAEMON_HOOK = f"""
import os, sys

def _by_import():
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False

_log = os.open(os.environ["EVALUATIONS"], os.O_WRONLY | os.O_APPEND)
_main = os.getpid()

def _hook(event, arguments):
    if event in {_FORBIDDEN!r} and os.getpid() == _main and not _by_import():
        os.write(_log, f"{{event}} {{arguments!r:.200}}\\n".encode())

sys.addaudithook(_hook)
"""

PROGRAMS = [
    "1 + 1",
    "def f(:",
    "import os\nos.getpid()",
    "import socket",
    "raise ValueError('\\x1b[31m')",
    "import pickle\npickle.dumps(print)",
    "class Odd:\n    def __reduce__(self):\n        return print, ('unpickled',)\nOdd()",
    "exec('x = 1'); eval('x')",
    "tool({'a': (1, 2)}, b=[1.5])",
    "print('#!/usr/bin/python'); bytes(10**6)",
    "import os\nos._exit(1)",
    LINK + "say({'t': 'output'}, __import__('pickle').dumps(print)); done()",
    # The interpreter of the last one reaches its own end later and dies of it, whatever it does at that moment.
    "1 + 1",
]


def test_the_daemon_evaluates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="a-"))
    seen = directory / "seen"
    seen.touch()
    (directory / "sitecustomize.py").write_text(_DAEMON_HOOK)
    monkeypatch.setenv("EVALUATIONS", str(seen))
    monkeypatch.setenv("PYTHONPATH", str(directory), prepend=os.pathsep)

    control = "import pickle, marshal; pickle.loads(pickle.dumps(print)); marshal.loads(marshal.dumps(1)); exec('1')"
    subprocess.run([sys.executable, "-c", control], check=True)
    assert {line.split()[0] for line in seen.read_text().splitlines()} == set(_FORBIDDEN)

    with running_daemon(directory) as daemon, daemon.client() as client:
        seen.write_text("")  # evaluations of the start are the daemon's own
        outcomes = _varied_work(client)
        assert seen.read_text() == ""
    assert {Outcome.SUCCEEDED, Outcome.EXCEPTION, Outcome.IMPORT_DENIED, Outcome.EXITED} <= outcomes
    shutil.rmtree(directory)


def _varied_work(client: ExecutorClient) -> set[Outcome]:
    outcomes = set()
    for imports in (["*"], []):
        with client.create_session(authorized_imports=imports, prelude="y = 1") as session:
            _ship_tools(session)
            session.register_tools({"tool": lambda *args, **kwargs: [args, kwargs]})
            session.set_variables({"x": {1, 2}, "function": lambda: 1, "large": b"x" * 10**6})
            outcomes |= {session.execute(program).outcome for program in PROGRAMS}
            session.put_file("a.pkl", pickle.dumps(print))
            session.get_file("a.pkl")
            session.list_files()
            session.get_variables()
        with client.create_session(authorized_imports=imports) as session:
            outcomes.add(session.execute("def f():\n    return 1\nclass C:\n    pass\nc = C()").outcome)
            state = session.export_state()
            assert state.manifest is not None and state.manifest.variables
        with client.create_session(authorized_imports=imports, state=state) as session:
            assert session.restored is not None and session.restored.variables
    client.list_sessions()
    return outcomes


def _ship_tools(session: Session) -> None:
    """Registers tools that the sandbox can make and tools that it can't: the daemon forwards both."""
    source = types.ToolSource(text="def tool():\n    return shown", entry="tool", bindings=_packed({"shown": print}))
    for shipped in (
        types.ShippedTool(source=source),
        types.ShippedTool(value=_packed(print)),
        types.ShippedTool(source=types.ToolSource(text="raise ValueError", entry="tool")),
        types.ShippedTool(value=types.Value(packed=types.Payload(inline=pickle.dumps(print)))),
        types.ShippedTool(source=source, modules=["nowhere", "os.path"]),
    ):
        tools = [types.ToolSpec(name="tool", shipped=shipped)]
        try:
            request = service.RegisterToolsRequest(session_id=session.session_id, tools=tools)
            session._transport.call(request)
        except InvalidRequest as refusal:
            assert refusal.reason in ("TOOL_REFUSED", "MODULES_MISSING")
        else:
            session.execute("tool()")


def _packed(value: Any) -> types.Value:
    inline = values.encode(value, fallback=lambda _: _PICKLED)
    return types.Value(packed=types.Payload(inline=inline))


_watched: list[str] | None = None


def _client_hook(event: str, arguments: Any) -> None:
    if _watched is None or event not in _FORBIDDEN:
        return
    frame: FrameType | None = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None:
        _watched.append(f"{event} {arguments!r:.200}")


@contextmanager
def watching() -> Iterator[list[str]]:
    """Collects the evaluations of this process in this context. A hook can't be removed, so it is switched off."""
    global _watched
    if not _hooked:
        sys.addaudithook(_client_hook)
        _hooked.append(True)
    seen: list[str] = []
    _watched = seen
    try:
        yield seen
    finally:
        _watched = None


_hooked: list[bool] = []

_PICKLED = b"cp%d.%d\0" % sys.version_info[:2] + pickle.dumps(print)
# Values as a hostile sandbox or daemon may send them.
POISON = {
    "a bare pickle": pickle.dumps(print),
    "a pickle as the client itself would send it": values.encode(print, fallback=lambda _: _PICKLED),
    "a pickled array": pack(b'["np.array","|O",[1],"C","gASVHAAAAAAAAACMCGJ1aWx0aW5zlIwFcHJpbnSUk5Qu"]', []),
    "code": pack(b'["code","__import__(\'os\')"]', []),
    "a type that is imported by name": pack(b'["dataclass","os.system",["id"]]', []),
}


def test_the_watch_sees_an_unpickling() -> None:
    with watching() as seen:
        pickle.loads(pickle.dumps(print))
        compile("1", "x", "eval")
    assert [line.split()[0] for line in seen] == ["pickle.find_class", "compile"]


@pytest.mark.parametrize("poison", POISON)
def test_the_client_evaluates_nothing_that_a_daemon_sends(poison: str) -> None:
    data = POISON[poison]
    value = types.Value(packed=types.Payload(inline=data))
    directory = Path(tempfile.mkdtemp(prefix="p-"))
    with fake_daemon.serve(directory) as daemon:
        call = fake_daemon.tool_call("tool")
        call.tool_call.arguments.CopyFrom(value)
        image = types.ImageEvent(data=types.Payload(inline=data), mime_type="image/png", source="display")
        events = [call, types.Event(image=image), fake_daemon.result(value)]
        daemon.journal = [_numbered(number, event) for number, event in enumerate(events, start=1)]
        called: list[Any] = []
        with ExecutorClient(daemon.address, token=fake_daemon.TOKEN) as client:
            session = client.create_session()
            session.register_tools({"tool": lambda *args: called.append(args)})
            with watching() as seen:
                result = session.execute("code")
                assert seen == []
        assert isinstance(result.output, OpaqueValue)
        assert result.images == []
        assert called == []
    shutil.rmtree(directory)


def _numbered(number: int, event: Any) -> fake_daemon.Numbered:
    return fake_daemon.Numbered(number, event)


def test_neither_the_daemon_nor_the_client_names_an_unpickler() -> None:
    """Only the guest's decoder and its reader of states unpickle, which run in sandboxes only."""
    root = Path(__file__).parents[2]
    found = []
    for folder in (root / "executor_server", root / "client" / "executor_client", root / "proto" / "executor_api"):
        for path in folder.rglob("*.py"):
            text = path.read_text()
            if any(name in text for name in _UNPICKLERS) and _imported(ast.parse(text)) & _UNPICKLERS:
                found.append(path.relative_to(folder).as_posix())
    # The client pickles, for sandboxes to load. The archive of the guest holds bytecode that the daemon itself made.
    assert sorted(found) == [
        "_core/values.py",
        "guest/bytecode.py",
        "guest/checks/checker.py",
        "guest/interpreter/encoding.py",
        "guest/interpreter/runtime.py",
        "guest/state/restore.py",
        "guest/state/writer.py",
    ]


_UNPICKLERS = {"pickle", "marshal", "dill", "shelve", "joblib", "yaml", "cloudpickle"}


def _imported(tree: ast.Module) -> set[str]:
    """The packages that a module names in its imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}
