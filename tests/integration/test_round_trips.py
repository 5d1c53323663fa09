"""Values on their paths from an agent into the sandbox and back, compared by type and content; and large ones, by memory.

That the codec gives back what it is given is tested where it is; here, that every path of an agent uses it, in full.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import PIL.Image
import pytest
from smolagents import Tool, tool
from smolagents.agent_types import AgentImage, AgentText

from executor_api.values import EnumValue, OpaqueValue, Record, TupleRecord
from executor_client.smolagents import RemoteExecutor
from tests.support.agents import agent_on
from tests.support.backends import require
from tests.support.daemon import Daemon, running_daemon
from tests.support.memory import growth_of
from tests.support.rounds import usual
from tests.unit.values.cases import CASES, same

IMPORTS = ["numpy.*", "pandas.*", "PIL.*", "enum", "dataclasses", "collections"]

ARRAYS: list[Any] = [
    *(np.array([1, 2], dtype) for dtype in ("?", "i1", "u8", "f2", ">f4", "f8", "c16", "M8[ns]", "m8[s]")),
    *(np.array(["é", ""]), np.array([b"a", b"\xff"]), np.array(7), np.zeros((0, 3)), np.arange(6).reshape(2, 3).T),
    np.array([(1, "x")], [("n", "i4"), ("s", "U3")]),
    *(np.float32(0.1), np.int64(-1), np.bool_(True), np.str_("é"), np.datetime64("2024-02-29")),
]
TABLES: list[Any] = [
    pd.DataFrame({"n": [1, 2], "x": [0.5, None], "t": ["é", None]}, index=pd.Index(["a", "b"], name="key")),
    pd.DataFrame({("a", 1): [1], ("a", 2): [pd.Timestamp("2024-02-29", tz="Europe/Paris")]}),
    pd.DataFrame({"c": pd.Categorical(["u", "v"]), "i": pd.array([1, None], "Int64"), "p": pd.period_range("2024", periods=2)}),
    pd.DataFrame(),
    pd.Series([1, 2], pd.date_range("2024-01-01", periods=2), name="s"),
]  # fmt: skip
SCALARS: list[Any] = [
    pd.NA,
    pd.NaT,
    pd.Timestamp("2024-02-29 12:00", tz="UTC"),
    pd.Timedelta(1, "s"),
    pd.Interval(0, 1),
]


def pictures() -> list[PIL.Image.Image]:
    shades = PIL.Image.linear_gradient("L").resize((20, 10))
    return [shades.convert(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I", "F", "CMYK", "YCbCr", "HSV")]


def can_be_printed(value: Any) -> bool:
    """smolagents prints each output; of integers with more than some digits, Python refuses that."""
    try:
        str(value)
    except ValueError:
        return False
    return True


KINDS: dict[str, list[Any]] = {
    "standard": list(filter(can_be_printed, CASES)),
    "arrays": ARRAYS,
    "tables": TABLES,
    "scalars": SCALARS,
    "images": pictures(),
}


def alike(left: Any, right: Any) -> bool:
    """True when two values have the same types and contents."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, pd.DataFrame):
        pd.testing.assert_frame_equal(left, right, check_freq=True)
        return True
    if isinstance(left, pd.Series):
        pd.testing.assert_series_equal(left, right, check_freq=True)
        return True
    if isinstance(left, PIL.Image.Image):
        return bool(left.mode == right.mode and left.size == right.size and left.tobytes() == right.tobytes())
    if left is pd.NA or left is pd.NaT:
        return left is right
    return same(left, right)


def assert_alike(arrived: Any, sent: list[Any]) -> None:
    assert type(arrived) is list and len(arrived) == len(sent)
    different = [(right, left) for left, right in zip(arrived, sent, strict=True) if not alike(left, right)]
    assert not different, f"{different!r:.3000}"


def names_of_types(values: list[Any]) -> list[str]:
    return [type(value).__module__.partition(".")[0] + "." + type(value).__qualname__ for value in values]


NAMES_OF_TYPES = "[type(v).__module__.partition('.')[0] + '.' + type(v).__qualname__ for v in values]"


# ---------------------------------------------------------------------------------------------------------------------
# What is the same on both sides


@pytest.mark.parametrize("kind", KINDS)
def test_values_go_into_the_sandbox_and_back_on_every_way_of_an_agent(daemon: Daemon, kind: str) -> None:
    """In as a task's variable and as a tool's result; back as a tool's argument, an output, a final answer, a variable."""
    sent = KINDS[kind]
    taken: dict[str, Any] = {}

    @tool
    def take(name: str, value: Any) -> Any:
        """Takes a value and gives it back.

        Args:
            name: what it is
            value: it
        """
        taken[name] = value
        return value

    code = f"""
take("types", {NAMES_OF_TYPES})
back = take("values", values)
take("types of the result", {NAMES_OF_TYPES.replace("values", "back")})
values
"""
    with agent_on(daemon, code, "final_answer(back)", tools=[take], additional_authorized_imports=IMPORTS) as agent:
        agent.state["values"] = sent  # as additional_args does, which smolagents also writes into the task
        answer = agent.run("go")
        output = agent.memory.steps[1].action_output
        variables = agent.python_executor._lease.session().get_variables(["values", "back"])
    assert taken["types"] == taken["types of the result"] == names_of_types(sent)
    for arrived in (taken["values"], output, answer, variables["values"], variables["back"]):
        assert_alike(arrived, sent)


def test_what_is_shared_or_contains_itself_does_so_on_the_other_side(executor: RemoteExecutor) -> None:
    row, array = [1], np.zeros(2)
    value: dict[str, Any] = {"rows": [row, row], "arrays": (array, array)}
    value["self"] = value
    seen: list[Any] = []
    executor.send_variables({"value": value})

    def take(given: Any) -> Any:
        seen.append(given)
        return given

    executor.send_tools({"take": take})
    code = """
def shape(v):
    return [v["rows"][0] is v["rows"][1], v["arrays"][0] is v["arrays"][1], v["self"] is v]
back = take(value)
value["rows"][0].append(2)
back["arrays"][0][0] = 7
take(shape(value) + shape(back))
(value["rows"], back["arrays"][1][0])
"""
    assert executor(code).output == ([[1, 2], [1, 2]], 7.0)
    argument, shapes = seen
    output = executor("value").output
    variable = executor._lease.session().get_variables(["back"])["back"]
    assert shapes == [True] * 6
    for arrived in (argument, output, variable):
        assert arrived["rows"][0] is arrived["rows"][1]
        assert arrived["arrays"][0] is arrived["arrays"][1]
        assert arrived["self"] is arrived
    assert row == [1], "the sandbox works on values of its own"


# ---------------------------------------------------------------------------------------------------------------------
# What is not


def test_objects_of_the_users_classes_are_themselves_in_the_sandbox_and_records_when_they_come_back(
    executor: RemoteExecutor,
) -> None:
    class Color(enum.Enum):
        RED = "r"

    @dataclasses.dataclass
    class Point:
        x: int
        color: Color

        def double(self) -> int:
            return 2 * self.x

    pair = collections.namedtuple("pair", ["left", "right"])
    offset = 10

    executor.send_variables(
        {"point": Point(3, Color.RED), "pair": pair(1, [2]), "add": lambda number: number + offset, "Point": Point}
    )
    output = executor("(point.double(), point.color.name, pair.left, add(1), isinstance(point, Point))").output
    assert output == (6, "RED", 1, 11, True)
    point, color, two = executor("[point, point.color, pair]").output
    assert (type(point), type(color), type(two)) == (Record, EnumValue, TupleRecord)
    assert (point.x, point.type_name.endswith("Point"), color.name, color.value) == (3, True, "RED", "r")
    assert (two, two.right, two._fields) == ((1, [2]), [2], ("left", "right"))
    # And once more in and back: what they are by now, they stay.
    executor.send_variables({"again": [point, color, two]})
    again = executor("again").output
    assert list(map(type, again)) == [Record, EnumValue, TupleRecord]
    assert (again[0].x, again[1], again[2]) == (3, color, two)


OPAQUE = {
    "an object": ("class Thing:\n    def __repr__(self):\n        return '<the thing>'\nv = Thing()", "<the thing>"),
    "an object without a repr of its own": ("class Thing:\n    pass\nv = Thing()", "Thing object at 0x"),
    "an object whose repr fails": ("class Thing:\n    def __repr__(self):\n        raise ValueError\nv = Thing()", "Thing"),
    "a function": ("def work(x):\n    return x\nv = work", "<function work at 0x"),
    "a class": ("class Thing:\n    pass\nv = Thing", "<class '__main__.Thing'>"),
    "a module": ("import math\nv = math", "<module 'math'"),
    "a generator": ("v = (n for n in range(3))", "<generator object <genexpr> at 0x"),
    "an open file": ("v = open('f', 'w')", "<_io.TextIOWrapper name='f'"),
    "a lock": ("import threading\nv = threading.Lock()", "<unlocked _thread.lock object at 0x"),
}  # fmt: skip


# A tool would get a text in its place; the call says so instead.
CODE = ("a function", "a class", "a module", "a generator")


@pytest.mark.parametrize("what", OPAQUE)
def test_what_has_no_form_comes_back_as_its_repr_and_stays_usable_in_the_sandbox(daemon: Daemon, what: str) -> None:
    code, shown = OPAQUE[what]
    taken: list[Any] = []

    @tool
    def take(value: Any) -> None:
        """Takes a value.

        Args:
            value: anything
        """
        taken.append(value)

    call = "try:\n    take([v, 1])\nexcept TypeError as error:\n    print(error)"
    script = (f"{code}\n{call}\n(v, 1)", "kept = v\nfinal_answer({'v': v, 'is': kept is v})")
    with agent_on(daemon, *script, tools=[take], additional_authorized_imports=["threading"]) as agent:
        answer = agent.run("go")
        seen = [agent.memory.steps[1].action_output[0], *(each[0] for each in taken), answer["v"]]
        assert shown in agent.memory.steps[1].observations, "the model reads what it has"
        assert ("can't leave the sandbox" in agent.memory.steps[1].observations) == (what in CODE)
    for value in seen:
        assert type(value) is OpaqueValue and shown in repr(value) and shown in str(value)
    assert answer["is"] is True and [each[1] for each in taken] == ([] if what in CODE else [1])


def test_final_answers_have_smolagents_types_and_images_can_be_given_again(daemon: Daemon) -> None:
    picture = PIL.Image.linear_gradient("L").convert("RGB").resize((30, 20))
    script = (
        "final_answer(picture.rotate(90, expand=True))",
        "final_answer(picture.size)",
        "final_answer('é' * 3)",
        "picture",
        "final_answer(None)",
    )
    with agent_on(daemon, *script, additional_authorized_imports=["PIL.*"]) as agent:
        turned = agent.run("go", additional_args={"picture": picture})
        assert type(turned) is AgentImage and alike(turned.to_raw(), picture.rotate(90, expand=True))
        assert agent.run("go", additional_args={"picture": turned}) == (20, 30)
        text = agent.run("go")
        assert type(text) is AgentText and text == "ééé"
        assert agent.run("go") is None
        assert alike(agent.memory.steps[1].action_output, turned.to_raw())


def test_answers_of_agents_and_results_of_image_tools_go_in_again_as_plain_values(daemon: Daemon) -> None:
    picture = PIL.Image.linear_gradient("L").resize((4, 3))

    class Draw(Tool):
        name = "draw"
        description = "Draws beside what it is given."
        inputs = {"before": {"type": "image", "description": "an image"}}  # noqa: RUF012
        output_type = "image"

        def forward(self, before: Any) -> Any:
            assert isinstance(before, PIL.Image.Image)
            return before.rotate(90, expand=True)

    code = """
images = [*answers["images"], draw(answers["images"][0])]
final_answer(([type(v).__name__ for v in (*images, answers["text"])], images[1].size))
"""
    answers = {"images": [AgentImage(picture)], "text": AgentText("x")}
    with agent_on(daemon, code, tools=[Draw()], additional_authorized_imports=["PIL.*"]) as agent:
        assert agent.run("go", additional_args={"answers": answers}) == (["Image", "Image", "str"], (3, 4))


# ---------------------------------------------------------------------------------------------------------------------
# 100 MB, in bounded memory

LARGE_BYTES = 100_000_000
CLIENT_FACTORS = {"array": 2.8, "table": 2.8, "image": 4.5}
"""A value and its packed form at the same time, and something: of the allocator, and of this process's other threads. The
pixels of an image cannot be sent from where they lie: there is a copy of them between the two, and what the allocator
has not given back of those before."""
JOURNAL_BYTES = 8 << 20
DAEMON_BYTES = 48 << 20
"""It keeps its journal, and what is on its way; of a value, pieces."""


@pytest.fixture(scope="module")
def lean_daemon() -> Iterator[Daemon]:
    """A daemon that keeps little of what was read."""
    require("local")
    with tempfile.TemporaryDirectory(prefix="d-") as directory:
        config = Path(directory) / "c.toml"
        config.write_text(f"sessions.journal_bytes = {JOURNAL_BYTES}\n")
        with running_daemon(Path(directory), "--config", str(config)) as running:
            yield running


def large_array() -> Any:
    return np.arange(LARGE_BYTES // 8, dtype=np.float64)


def large_table() -> Any:
    columns = np.arange(LARGE_BYTES // 8, dtype=np.int64).reshape(4, -1)
    return pd.DataFrame(
        {name: columns[number] * 1.5 if number % 2 else columns[number] for number, name in enumerate("abcd")}
    )


def large_image() -> Any:
    side = int((LARGE_BYTES / 4) ** 0.5)
    return PIL.Image.fromarray(np.arange(side * side, dtype=np.float32).reshape(side, side))


LARGE: dict[str, Callable[[], Any]] = {"array": large_array, "table": large_table, "image": large_image}


@pytest.mark.parametrize("kind", usual(LARGE, but=("image", "table")))
def test_a_hundred_megabytes_move_in_bounded_memory(lean_daemon: Daemon, kind: str) -> None:
    sent = LARGE[kind]()

    @tool
    def take(value: Any) -> Any:
        """Takes a value and gives it back.

        Args:
            value: it
        """
        return value

    with agent_on(lean_daemon, "final_answer(value)", tools=[take], additional_authorized_imports=IMPORTS) as agent:
        executor = agent.python_executor
        executor.send_variables({"value": np.zeros(1_000)})  # libraries that the first one loads are not counted
        executor.send_tools({"take": take})
        executor("take(value)")
        moves: dict[str, Callable[[], Any]] = {
            "variable of the task": lambda: executor.send_variables({"value": sent}) or sent,
            "argument and result of a tool": lambda: executor("back = take(value)\nNone") and sent,
            "evaluation": lambda: executor.evaluate("back"),
            "variable": lambda: executor._lease.session().get_variables(["back"])["back"],
            "final answer": lambda: raw(agent.run("go")),
        }
        if kind != "array":  # one kind tries these paths
            del moves["evaluation"], moves["variable"]
        for name, move in moves.items():
            for _ in range(3):  # on a loaded machine, another thread may still hold what the move before has used
                grown = growth_of(os.getpid(), lean_daemon.process.pid)
                arrived = move()
                client_bytes, daemon_bytes = grown()
                assert alike(arrived, sent), name
                if client_bytes < CLIENT_FACTORS[kind] * LARGE_BYTES:
                    break
                arrived = None
            assert client_bytes < CLIENT_FACTORS[kind] * LARGE_BYTES, f"{name}: {client_bytes:,} bytes"
            assert daemon_bytes < DAEMON_BYTES, f"{name}: {daemon_bytes:,} bytes"
            arrived = None


def raw(answer: Any) -> Any:
    return answer.to_raw() if isinstance(answer, AgentImage) else answer
