"""The tests that `make test` leaves to `make test-all`: each entry names one that there is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contract.marks import MEET_THE_BACKEND, OF_THE_GUEST
from tests.support.long_tests import LONG, Long, is_long

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("entry", LONG, ids=lambda entry: f"{Path(entry.file).stem}:{entry.test}")
def test_entry_names_a_test_and_what_is_run_instead(entry: Long) -> None:
    tree = ast.parse((ROOT / entry.file).read_text())
    names = [each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert any(name.startswith(entry.test) for name in names), f"{entry.file} has no {entry.test}"
    assert entry.kept


def test_those_that_meet_a_backend_are_tests_of_the_guest() -> None:
    sources = [(ROOT / "tests/contract" / file).read_text() for file in sorted(OF_THE_GUEST)]
    assert [name for name in sorted(MEET_THE_BACKEND) if not any(f"def {name}(" in text for text in sources)] == []


def test_parameters_are_whole_words() -> None:
    entry = Long("tests/a.py", "test_some", "the others", ("docker", "stdin later"))
    assert entry.names("tests/a.py", "test_something[docker]")
    assert entry.names("tests/a.py", "test_something[x-stdin later]")
    assert not entry.names("tests/a.py", "test_something[ours_docker-stdin]")
    assert not entry.names("tests/b.py", "test_something[docker]")
    all_but = Long("tests/a.py", "test_some", "the others", ("docker",), but=("flood",))
    assert all_but.names("tests/a.py", "test_something[docker-sleep]")
    assert not all_but.names("tests/a.py", "test_something[docker-flood]")
    assert not is_long("tests/unit/test_long_tests.py", "test_parameters_are_whole_words")
