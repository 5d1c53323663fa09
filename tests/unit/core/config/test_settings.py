"""A file of settings is read without trust, and all its problems are reported at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, model_validator

from executor_server.core.config.key_types import AbsolutePath, ConfigError, Count, Name, Section
from executor_server.core.config.problems import MAX_PROBLEMS, contradiction, dotted, refuse, undotted, validated
from executor_server.core.config.toml_file import MAX_FILE_BYTES, read_toml


class Range(Section):
    low: Count = 1
    high: Count = 10

    @model_validator(mode="after")
    def _check_order(self) -> Range:
        if self.low > self.high:
            refuse(self, [contradiction(("low",), f"must be at most {self.high}", self.low, also=[("high",)])])
        return self


class Settings(Section):
    ranges: Annotated[dict[Name, Range], Field(max_length=3)] = Field(default_factory=dict)
    entries: tuple[Range, ...] = ()
    maybe: Range | None = None
    place: AbsolutePath | None = None


def problems_of(tables: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validated(Settings, tables)
    return list(caught.value.problems)


# -- files


def problem_of_file(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_toml(path, "policy file")
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"a = ", "is not TOML: Invalid value (at end of document)"),
        (b"a = 1\na = 2", "is not TOML: Cannot overwrite a value (at "),
        (b"\xff = 1", "is not TOML: 'utf-8' codec can't decode"),
        (b"\0", "is not TOML"),
        (b"a = " + b"[" * 50_000, "is nested too deeply"),
        (b"a = " + b"[" * 20 + b"]" * 20, "is nested too deeply"),
        (b".".join([b"a"] * 100_000) + b" = 1", "is nested too deeply"),
        (b"a = " + b"9" * 10_000, "is not TOML: Exceeds the limit"),
    ],
    ids=["unfinished", "twice", "no-utf-8", "nul", "brackets", "deep", "dotted", "digits"],
)
def test_what_is_not_toml_is_one_sentence(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "p.toml"
    path.write_bytes(data)
    assert f"The policy file {path} {said}" in problem_of_file(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert problem_of_file(tmp_path / "p.toml") == (
        f"The policy file {tmp_path}/p.toml can't be read: No such file or directory."
    )


def test_a_directory_is_not_read(tmp_path: Path) -> None:
    assert problem_of_file(tmp_path).endswith("is not a regular file.")


def test_nobody_is_waited_for_at_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.toml")
    assert problem_of_file(tmp_path / "p.toml").endswith("is not a regular file.")


def test_a_device_is_not_read() -> None:
    assert problem_of_file(Path("/dev/zero")).endswith("is not a regular file.")


def test_a_file_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    with path.open("wb") as file:
        file.truncate(2**30)
    assert problem_of_file(path).endswith(f"is larger than {MAX_FILE_BYTES:,} bytes.")


def test_a_link_to_a_file_is_followed(tmp_path: Path) -> None:
    """Kubernetes mounts config maps as links."""
    (tmp_path / "data").write_text("a = 1")
    (tmp_path / "p.toml").symlink_to("data")
    assert read_toml(tmp_path / "p.toml", "policy file") == {"a": 1}


# -- problems


@pytest.mark.parametrize(
    ("tables", "path"),
    [
        ({"rnges": {}}, "rnges"),
        ({"ranges": {"a": {"hihg": 1}}}, "ranges.a.hihg"),
        ({"entries": [{}, {"hihg": 1}]}, "entries.1.hihg"),
        ({"maybe": {"hihg": 1}}, "maybe.hihg"),
        ({"ranges": {"a.b": {"hihg": 1}}}, 'ranges."a.b".hihg'),
    ],
)
def test_an_unknown_key_is_told_which_there_are(tables: dict[str, object], path: str) -> None:
    known = "ranges, entries, maybe, place" if path == "rnges" else "low, high"
    assert problems_of(tables) == [f"{path}: no such key; available: {known}"]


def test_a_contradiction_is_found_beside_what_is_wrong_elsewhere() -> None:
    tables: dict[str, object] = {
        "ranges": {"a": {"low": 5, "high": 4}, "b": {"low": "x"}, "-": {}},
        "entries": [{"low": 3, "high": 2}],
        "place": "here",
    }
    assert sorted(problem.partition(":")[0] for problem in problems_of(tables)) == [
        "entries.0.low",
        "place",
        "ranges.-",
        "ranges.a.low",
        "ranges.b.low",
    ]


def test_a_value_that_is_wrong_contradicts_nothing() -> None:
    """Its default, 10, would be below 20."""
    assert problems_of({"maybe": {"low": 20, "high": "much"}}) == [
        "maybe.high: must be a valid integer (it is 'much')",
    ]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("x" * 1000, "'" + "x" * 99 + "…"),
        (1 << 100_000, "a number of 100,001 bits"),
        ([["x"]] * 3, "an array of 3"),
        (True, "True"),
    ],
    ids=["text", "number", "array", "boolean"],
)
def test_a_wrong_value_is_shown_in_bounds(value: object, shown: str) -> None:
    (problem,) = problems_of({"maybe": {"low": value}})
    assert problem.endswith(f"(it is {shown})")


def test_the_list_of_problems_has_an_end() -> None:
    problems = problems_of({f"key{number}": 1 for number in range(MAX_PROBLEMS + 50)})
    assert len(problems) == MAX_PROBLEMS + 1
    assert problems[-1] == "and 50 more"


@given(st.lists(st.text(max_size=20), min_size=1, max_size=4).map(tuple))
def test_a_path_reads_back_as_the_same(path: tuple[str, ...]) -> None:
    assert undotted(dotted(path)) == path
