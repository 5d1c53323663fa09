"""The schemas of channel and links: what is written is read again, nothing else is, and no field changes unnoticed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.guest.wire.frames import Fields, FrameError, Kind, decode_head, encode_head
from executor_server.guest.wire.link import Packet
from executor_server.guest.wire.link_messages import RunProgram, message_of
from executor_server.guest.wire.messages import Done, Execute, FileEntry, Log, Result
from executor_server.guest.wire.schema import _REQUIRED, Field, Message, Record
from tests.support.rounds import rounds
from tests.unit.guest.wire.wire_schema import (
    CHANNEL_RECORDS,
    CHANNEL_SNAPSHOT,
    LINK_RECORDS,
    LINK_SNAPSHOT,
    channel_schema,
    link_schema,
)

CLASSES = [*CHANNEL_RECORDS, *LINK_RECORDS]
FIELDS = [(cls, name) for cls in CLASSES for name in cls.fields]
_TEXT = st.text(st.characters(), max_size=30)


def test_no_field_changes_without_another_protocol_version() -> None:
    """A guest of this version may be in a sandbox that a later daemon adopts: the two have to understand each other.

    A change needs a higher PROTOCOL_VERSION (frames.py); `python -m tests.unit.guest.wire.wire_schema` writes its snapshot.
    """
    assert CHANNEL_SNAPSHOT.exists(), "a new version of the protocol has no snapshot yet"
    assert channel_schema() == CHANNEL_SNAPSHOT.read_text()


def test_no_field_between_supervisor_and_children_changes_by_accident() -> None:
    """Both ends are of one version, so a change needs no other: `python -m tests.unit.guest.wire.wire_schema` writes it."""
    assert link_schema() == LINK_SNAPSHOT.read_text()


def test_each_kind_of_frame_has_one_message() -> None:
    assert set(Message.by_kind) == {value for name, value in vars(Kind).items() if name.isupper()}


def _values(field: Field) -> st.SearchStrategy[Any]:
    """The forms that a field may have."""
    form, bounds = field.reader.__name__, field.bounds
    if form == "text":
        return _TEXT.map(lambda value: value[: bounds[0]])
    if form == "_read_id":
        return st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True)
    if form == "_read_one_of":
        return st.sampled_from(sorted(bounds[0]))
    if form == "integer":
        return st.integers(*bounds)
    if form == "number":
        return st.floats(*bounds) | st.integers(1, 5).map(float)
    if form == "boolean":
        return st.booleans()
    if form == "texts":
        return st.lists(_TEXT, max_size=3)
    if form == "_read_record":
        return _made(bounds[0])
    if form == "_read_records":
        return st.lists(_made(bounds[0]), max_size=3)
    assert form == "_read_scalars"
    return st.dictionaries(_TEXT, st.integers() | st.floats(0, 1) | _TEXT, max_size=3)


_known: dict[type[Record], st.SearchStrategy[Record]] = {}


def _made(cls: type[Record]) -> st.SearchStrategy[Record]:
    if cls in _known:
        return _known[cls]
    required = {name: _values(field) for name, field in cls.fields.items() if field.default is _REQUIRED}
    optional = {name: _values(field) for name, field in cls.fields.items() if field.default is not _REQUIRED}
    _known[cls] = st.fixed_dictionaries(required, optional=optional).map(lambda values: cls(**values))
    return _known[cls]


@given(st.sampled_from(CLASSES).flatmap(_made))
@settings(deadline=None)
def test_what_is_written_is_read_again(value: Record) -> None:
    head = decode_head(encode_head(value.head()))
    assert type(value).read(head) == value
    written = [name for name in head.values if name != "t"]  # the kind of a message on a link
    assert [name for name in type(value).fields if name in head] == written, "in the order of the class"


_WRONG: dict[str, list[Any]] = {
    "text": [None, 1, True, ["a"], {}],
    "_read_id": [None, 1, "a b", "a/b", "é", "x" * 65, "a\n"],
    "_read_one_of": [None, 1, "", "another"],
    "integer": [None, True, 1.0, "1", [1], 10**30],
    "number": [None, True, "1", float("nan"), float("inf"), -1e300, 1e300],
    "boolean": [None, 0, 1, "true"],
    "texts": [None, "a", [1], [None], {}],
    "_read_record": [None, "a", [], 1],
    "_read_records": [None, "a", {}, [1], [None]],
    "_read_scalars": [None, [], {"a": []}, {"a": {}}, {"a": None}, {str(number): 1 for number in range(33)}],
}


@given(st.data())
@settings(deadline=None, max_examples=rounds(10, 2))
@pytest.mark.parametrize(("cls", "name"), FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name in FIELDS])
def test_a_field_takes_its_type_and_bounds_and_nothing_else(cls: type[Record], name: str, data: st.DataObject) -> None:
    head = data.draw(_made(cls)).head()
    field = cls.fields[name]
    bounds = field.bounds
    wrong = list(_WRONG[field.reader.__name__])
    if field.reader.__name__ == "text":
        wrong.append("x" * (bounds[0] + 1))
    elif field.reader.__name__ == "_read_id" and bounds == (False,):
        wrong.append("")
    elif field.reader.__name__ == "integer":
        wrong += [bounds[0] - 1, bounds[1] + 1]
    elif field.reader.__name__ == "texts":
        wrong += [["a"] * (bounds[0] + 1), ["x" * (bounds[1] + 1)]]
    for value in wrong:
        with pytest.raises(FrameError, match=f"field {name} "):
            cls.read(Fields({**head, name: value}))
    rest = {key: value for key, value in head.items() if key != name}
    if field.default is _REQUIRED:
        with pytest.raises(FrameError, match=f"field {name} "):
            cls.read(Fields(rest))
    else:
        assert getattr(cls.read(Fields(rest)), name) == field.default


def test_a_field_that_is_not_known_is_ignored() -> None:
    assert Log.read(Fields({"id": "e", "stream": "stdout", "later": [1]})) == Log(id="e", stream="stdout")


def test_a_message_on_a_link_is_of_its_kind_and_is_read_once() -> None:
    program = RunProgram(filename="<execution-1>", source=3, operations=5)
    packet = Packet(decode_head(encode_head(program.head())), b"1+1code", None, 7, [])
    assert packet.head.values["t"] == "run"
    assert message_of(packet) == program
    assert message_of(packet) is message_of(packet)


@pytest.mark.parametrize("head", [{}, {"t": 1}, {"t": "none"}, {"t": "run"}, {"t": "run", "filename": "f"}])
def test_a_message_of_no_kind_or_without_its_fields_is_refused(head: dict[str, Any]) -> None:
    with pytest.raises(FrameError):
        message_of(Packet(Fields(head), b"", None, 0, []))


def test_none_is_a_field_that_is_left_out() -> None:
    assert Done(op=1, ok=True).head() == {"op": 1, "ok": True}
    entry = FileEntry(path="a", size=1, directory=False, modified=0.0)
    described = {"path": "a", "size": 1, "directory": False, "modified": 0, "mode": 0, "uid": 0, "gid": 0}
    assert Done(op=1, ok=True, file=entry).head()["file"] == described


def test_a_message_is_frozen() -> None:
    log = Log(id="e", stream="stdout")
    with pytest.raises(AttributeError):
        log.id = "f"  # type: ignore[misc]


@pytest.mark.parametrize("values", [{}, {"id": "e"}, {"id": "e", "stream": "stdout", "other": 1}])
def test_a_message_of_ours_with_other_fields_is_a_mistake(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        Log(**values)


def test_an_execution_and_its_result_have_the_bytes_that_they_always_had() -> None:
    """A journal of an earlier daemon holds both."""
    execute = Execute(
        id="e",
        mode="trailing_expression",
        asked={"wall_time_s": 2.0},
        wall_time_s=2.0,
        cpu_time_s=60.0,
        operations=10,
        output_bytes=99,
        policy="f",
    )
    assert encode_head(execute.head()) == (
        b'{"id":"e","mode":"trailing_expression","asked":{"wall_time_s":2.0},"wall_time_s":2.0,"cpu_time_s":60.0,'
        b'"operations":10,"output_bytes":99,"policy":"f"}'
    )
    result = Result(
        id="e",
        outcome="succeeded",
        error=0,
        variables="kept",
        generation=1,
        final="",
        operations=2,
        wall_time_s=0.5,
        cpu_time_s=0.25,
        peak_memory_bytes=7,
        output_bytes=0,
        oom_suspect=False,
        imports=["math"],
        output=3,
    )
    assert encode_head(result.head()) == (
        b'{"id":"e","outcome":"succeeded","error":0,"variables":"kept","generation":1,"final":"","operations":2,'
        b'"wall_time_s":0.5,"cpu_time_s":0.25,"peak_memory_bytes":7,"output_bytes":0,"oom_suspect":false,'
        b'"imports":["math"],"output":3}'
    )


def test_the_schema_imports_nothing_heavy() -> None:
    """A sandbox is not ready before it is loaded; `dataclasses` alone would take a fifth of the time that there is."""
    heavy = {"dataclasses", "enum", "typing", "inspect", "re", "json", "collections.abc"}
    program = (
        "import sys; sys.path.insert(0, 'proto'); before = set(sys.modules);"
        "import executor_server.guest.wire.link_messages, executor_server.guest.wire.sequenced; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {program}"],
                          capture_output=True, text=True, check=True, timeout=60)  # fmt: skip
    assert not heavy & set(done.stdout.split())
