"""States that an attacker has made, against the sandbox that restores them and the daemon that passes them on."""

from __future__ import annotations

import io
import json
import pickle
import struct
import sys
import tarfile
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from executor_server.core import LANGUAGE_RULES
from executor_server.core.errors import ExecutorError, InvalidRequest, Reason
from executor_server.core.model import StateManifest, StateRules
from executor_server.sessions import SessionRequest
from executor_server.sessions.session import Session
from executor_server.sessions.state_archive import StateArchives, header_of
from tests.contract.harness import PRINCIPAL, Harness, open_harness, pieces
from tests.support.backends import require

NOTHING = StateManifest((), (), 0, 0, (), "3.11.7")


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    """Runs on the local backend: the interpreter and the daemon, which are attacked, are the same on each."""
    require("local")
    async with open_harness("local") as ready:
        yield ready


@pytest.fixture
def archives(tmp_path: Path) -> StateArchives:
    return StateArchives(tmp_path / "states", b"ours")


async def trusting(harness: Harness, **options: Any) -> Session:
    """Creates a session whose policy allows states from any daemon."""
    spec = replace(harness.spec(**options), state=StateRules(allow_foreign=True))
    return await harness.manager.create(PRINCIPAL, SessionRequest(f"r{next(harness._names)}", spec))


async def forged(tmp_path: Path, variables: bytes, files: bytes | None = None) -> bytes:
    """Returns an archive of an attacker's own daemon, with arbitrary contents."""
    theirs = StateArchives(tmp_path / "theirs", b"theirs")
    with theirs.spool("x", 10**8) as spool:
        await spool.write(variables)
        first = spool.end_part()
        await spool.write(tar() if files is None else files)
        header = header_of("them", "s", theirs.key_id, (first, spool.end_part()), NOTHING)
        return b"".join([piece async for piece in theirs.signed(header, spool)])


def tar(*members: tarfile.TarInfo) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(b""))
    return raw.getvalue()


def link(name: str, target: str) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname = tarfile.SYMTYPE, target
    return made


def state(*segments: tuple[str, bytes], **index: Any) -> bytes:
    """Returns the variables' part of an archive, as a session writes it, with these pickles."""
    said = {
        "python": [3, 11, 7],
        "cloudpickle": "3",
        "refused": [],
        "variables": [{"name": name, "bytes": len(data), "code": False} for name, data in segments],
        "omitted": [],
        **index,
    }
    text = json.dumps(said, separators=(",", ":")).encode()
    return b"".join(data for _, data in segments) + text + struct.pack("!I", len(text))


def gadget(module: str, name: str, argument: str, protocol: int = 3) -> bytes:
    """Returns a pickle that calls this with a text."""
    text = argument.encode()
    said = b"X" + struct.pack("<I", len(text)) + text
    if protocol < 4:
        return b"\x80\x03c" + f"{module}\n{name}\n".encode() + said + b"\x85R."
    named = b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in (module, name))
    return b"\x80\x04" + named + b"\x93" + said + b"\x85R."


GADGETS = [
    ("os", "system", "touch owned"),
    ("posix", "system", "touch owned"),
    ("subprocess", "getoutput", "touch owned"),
    ("pickle", "loads", ""),
    ("_pickle", "loads", ""),
    ("cloudpickle", "loads", ""),
    ("cloudpickle.cloudpickle", "subimport", "os"),
    ("importlib", "import_module", "os"),
    ("_frozen_importlib", "__import__", "os"),
    ("runpy", "run_module", "this"),
    ("io", "open_code", "/etc/passwd"),
    ("json.codecs.builtins", "exec", "import os"),
    ("builtins", "__import__", "os"),
    ("builtins", "exec", "import os"),
    ("builtins", "eval", "__import__('os')"),
    ("timeit", "timeit", "import os"),
    ("pkgutil", "resolve_name", "os:system"),
    ("pydoc", "locate", "os.system"),
    ("logging.config", "_resolve", "os.system"),
    ("test.support.import_helper", "import_module", "os"),
    ("unittest.mock", "_importer", "os"),
    ("zipimport", "zipimporter", "/"),
    ("antigravity", "geohash", "1"),
    ("_osx_support", "_read_output", "touch owned"),
    ("executor_guest.checks.imports", "make_import", "x"),
    ("executor_guest.state.restore", "importlib", "x"),
    ("executor_guest.checks.hooks", "elsewhere", "x"),
    ("cloudpickle.cloudpickle", "_lookup_module_and_qualname", "x"),
    ("cloudpickle.cloudpickle", "_builtin_type", "CodeType"),
    ("cloudpickle.cloudpickle", "_builtin_type", "FunctionType"),
    ("cloudpickle.cloudpickle", "_builtin_type", "LambdaType"),
    ("types", "CodeType", "x"),
    ("types", "FunctionType", "x"),
    ("__main__", "__builtins__", "x"),
    ("workspace_module", "run", "x"),
]


@pytest.mark.parametrize("protocol", [3, 4])
async def test_a_pickle_reaches_no_more_than_the_program_may(
    harness: Harness, archives: StateArchives, tmp_path: Path, protocol: int
) -> None:
    session = await trusting(harness, imports=("math",))
    tries = {f"x{n}": gadget(*each, protocol) for n, each in enumerate(GADGETS)}
    data = await forged(tmp_path, state(*tries.items(), ("y", pickle.dumps(1, 3))))
    restored = await session.restore_state(archives, pieces(data))
    assert restored.variables == ("y",), [(name, tries[name]) for name in restored.variables if name in tries]
    assert (await harness.run(session, "y")).output == 1
    assert (await harness.run(session, "import os")).outcome == "import_denied"
    assert not (await session.list_files(""))[0]


def named(module: str, name: str) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def placeholder(name: str) -> bytes:
    return text(name) + b"Q"


OWN = [
    *map(placeholder, ("globals", "builtins", "hooks", "main", "hook:load", "constant:ticks", "builtin:builtins()")),
    *map(placeholder, ("own:code", "own:function", "own:settle", "own:module", "own:cell")),
    named("cloudpickle.cloudpickle", "_make_function"),
    named("cloudpickle.cloudpickle", "_class_setstate"),
]
REACHES = {
    "sets an item": lambda what: what + text("__import__") + named("builtins", "len") + b"s",
    "sets its builtins": lambda what: what + text("__builtins__") + b"}s",
    "sets its state": lambda what: what + b"}" + text("given") + b"}s" + b"b",
    "sets its attributes": lambda what: what + b"N}" + text("_enforcer") + b"Ns\x86b",
    "asks for its referee": lambda what: named("builtins", "getattr") + what + text("_enforcer") + b"\x86R",
    "asks whose it is": lambda what: named("builtins", "getattr") + what + text("__self__") + b"\x86R",
    "asks what it calls": lambda what: named("builtins", "getattr") + what + text("func") + b"\x86R",
    "settles it": lambda what: placeholder("own:settle") + what + b"}" + text("__doc__") + b"Ns\x86R",
}


async def test_a_pickle_gets_hold_of_nothing_of_the_interpreters_own(
    harness: Harness, archives: StateArchives, tmp_path: Path
) -> None:
    session = await trusting(harness, imports=("math",))
    tries = [
        (f"x{n}", b"\x80\x03" + connection(each) + b".")
        for n, (each, connection) in enumerate(product(OWN, REACHES.values()))
    ]
    restored = await session.restore_state(archives, pieces(await forged(tmp_path, state(*tries, python=HERE))))
    assert restored.variables == (), restored
    assert (await harness.run(session, "import os")).outcome == "import_denied"
    assert (await harness.run(session, "while True: pass", operations=1000)).outcome == "operation_limit"


HERE = list(sys.version_info[:3])


def of_code(source: str, *, function: bytes, namespace: bytes, more: bytes = b"") -> bytes:
    """Returns a pickle that makes a function of code that was not instrumented."""
    arguments = cloudpickle.cloudpickle._code_reduce(compile(source, "x", "exec"))[1]
    packed = pickle.dumps(arguments, 3)[2:-1]
    return (
        b"\x80\x03" + function + b"(" + placeholder("own:code") + packed + b"R" + namespace + text("f") + more + b"tR."
    )


NAMED = named("types", "FunctionType")
OF_CLOUDPICKLE = named("cloudpickle.cloudpickle", "_make_function")
OF_A_TYPE = named("builtins", "type") + named("cloudpickle.cloudpickle", "_make_cell") + b"\x85R"


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(
    ("function", "namespace", "more"),
    [
        (NAMED, b"}", b""),
        (OF_A_TYPE, b"}", b""),
        (placeholder("own:function"), b"}", b"N"),
        (placeholder("own:function"), placeholder("globals"), b"N"),
        (OF_CLOUDPICKLE, b"}", b"NN"),
    ],
)
async def test_code_of_a_pickle_has_the_builtins_of_its_session(
    harness: Harness,
    archives: StateArchives,
    tmp_path: Path,
    says: bool,
    function: bytes,
    namespace: bytes,
    more: bytes,
) -> None:
    """Also when the state declares that it holds code, and the rules allow that."""
    session = await trusting(harness, imports=("math",))
    data = of_code("import os\nos.mkdir('owned')", function=function, namespace=namespace, more=more)
    index = {"python": HERE, "variables": [{"name": "f", "bytes": len(data), "code": says}]}
    restored = await session.restore_state(archives, pieces(await forged(tmp_path, state(("f", data), **index))))
    takes = says and (namespace == placeholder("globals") or function == OF_CLOUDPICKLE)
    assert restored.variables == (("f",) if takes else ()), restored
    if takes:
        assert (await harness.run(session, "f()")).outcome == "import_denied"
    assert not (await session.list_files(""))[0]


async def test_a_file_of_the_workspace_is_not_imported(
    harness: Harness, archives: StateArchives, tmp_path: Path
) -> None:
    """The files of a state are in the workspace before its variables are read."""
    session = await trusting(harness, imports=("math",))
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as archive:
        source = b"open('owned', 'w')\nclass C: pass\n"
        member = tarfile.TarInfo("evil.py")
        member.size = len(source)
        archive.addfile(member, io.BytesIO(source))
    variables = state(("x", b"\x80\x03" + named("evil", "C") + b"."))
    restored = await session.restore_state(archives, pieces(await forged(tmp_path, variables, raw.getvalue())))
    assert restored.variables == ()
    assert [each.path for each in (await session.list_files(""))[0]] == ["evil.py"]


@pytest.mark.parametrize("protocol", [4])
@pytest.mark.parametrize("name", ["sys.modules", "codecs.builtins.exec", "decoder.scanner.re.sys"])
async def test_a_dotted_name_evades_nothing(
    harness: Harness, archives: StateArchives, tmp_path: Path, protocol: int, name: str
) -> None:
    session = await trusting(harness, imports=("math",))
    named = b"".join(b"\x8c" + bytes([len(each)]) + each.encode() for each in ("json", name))
    data = await forged(tmp_path, state(("x", b"\x80\x04" + named + b"\x93.")))
    assert (await session.restore_state(archives, pieces(data))).variables == ()


@pytest.mark.parametrize(
    "variables",
    [
        b"",
        b"\0" * 100,
        b"\xff" * 100,
        state(("x", b"\x80\x03K\x01."), python="3"),
        state(("x", b"\x80\x03K\x01."), variables=[{"name": "x", "bytes": 10**12, "code": False}]),
        state(("x", b"\x80\x03K\x01."), variables=[{"name": "x", "bytes": -1, "code": False}]),
        state(variables=[{"name": f"v{n}", "bytes": 0, "code": False} for n in range(3000)]),
    ],
)
async def test_what_no_session_has_written_is_refused(
    harness: Harness, archives: StateArchives, tmp_path: Path, variables: bytes
) -> None:
    session = await trusting(harness)
    with pytest.raises(InvalidRequest) as refused:
        await session.restore_state(archives, pieces(await forged(tmp_path, variables)))
    assert refused.value.reason is Reason.STATE_REFUSED
    assert (await harness.run(session, "1")).state == "kept"


@pytest.mark.parametrize(
    "segment",
    [
        b"",
        b".",
        b"\x80\x03",
        b"\x80\x03j\xff\xff\xff\x7f.",
        b"\x80\x03X\xff\xff\xff\x7fa.",
        b"\x80\x03B\xff\xff\xff\xffa.",
        b"\x80\x03" + b"(" * 200_000 + b".",
        b"\x80\x03" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x03N.N.N.",
        b"\x80\x03r\xff\xff\xff\x7f.",
        b"\x80\x03Nr\xff\xff\xff\x7f.",
        b"\x80\x03X\x00\x00\x00\x00Q.",
        b"\x80\x03X\x0c\x00\x00\x00own:functionQN\x85R.",
    ],
)
async def test_a_broken_pickle_costs_its_variable_at_most_its_interpreter(
    harness: Harness, archives: StateArchives, tmp_path: Path, segment: bytes
) -> None:
    session = await trusting(harness)
    data = await forged(tmp_path, state(("bad", segment), ("good", pickle.dumps([1], 3))))
    try:
        restored = await session.restore_state(archives, pieces(data))
    except InvalidRequest as refused:
        assert refused.reason is Reason.STATE_REFUSED
    else:
        assert "good" in restored.variables and (await harness.run(session, "good")).output == [1]
    assert (await harness.run(session, "1 + 1")).output == 2


@pytest.mark.parametrize("name", ["__builtins__", "__name__", "__loader__"])
async def test_no_name_of_the_interpreters_own_is_replaced(
    harness: Harness, archives: StateArchives, tmp_path: Path, name: str
) -> None:
    session = await trusting(harness, imports=("math",))
    data = await forged(tmp_path, state((name, pickle.dumps({}, 3))))
    assert (await session.restore_state(archives, pieces(data))).variables == ()
    assert (await harness.run(session, "import os")).outcome == "import_denied"


@pytest.mark.parametrize(
    "member",
    [link("l", "/etc"), tarfile.TarInfo("/etc/cron.d/x"), tarfile.TarInfo("../x"), tarfile.TarInfo("a/../../x")],
)
async def test_files_go_nowhere_else(
    harness: Harness, archives: StateArchives, tmp_path: Path, member: tarfile.TarInfo
) -> None:
    session = await trusting(harness)
    with pytest.raises(ExecutorError) as refused:
        await session.restore_state(archives, pieces(await forged(tmp_path, state(), tar(member))))
    assert refused.value.reason is Reason.PATH_REFUSED


async def test_the_strictest_rules_of_the_language_leave_states_as_they_are(
    harness: Harness, archives: StateArchives
) -> None:
    """The copy that writes is a process of the guest and no program's."""
    spec = replace(harness.spec(imports=("math",)), refused_language=LANGUAGE_RULES)
    one, other = [
        await harness.manager.create(PRINCIPAL, SessionRequest(f"r{next(harness._names)}", spec)) for _ in range(2)
    ]
    code = "import math\ndef f(x):\n    return math.sqrt(x) + len(str(x))\na = [f(4)]\nb = getattr\nclass P:\n    n = 1\np = P()"
    assert (await harness.run(one, code)).outcome == "succeeded"
    *data, manifest = [part async for part in one.export_state(archives)]
    assert isinstance(manifest, StateManifest) and not manifest.omitted_variables
    restored = await other.restore_state(archives, pieces(b"".join(part for part in data if isinstance(part, bytes))))
    assert not restored.omitted_variables
    assert (await harness.run(other, "f(4), a, b(p, 'n'), isinstance(p, P)")).output == (3.0, [3.0], 1, True)
    assert (await harness.run(other, "b(p, '__class__')")).outcome == "policy_denied"
    assert (await harness.run(one, "().__class__")).outcome == "policy_denied"
