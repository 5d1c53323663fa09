"""Changes are merged: one for each path, its outcome since the last report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.guest.watches.changes import MAX_WAITING, Changes


def taken(changes: Changes, most: int = 1000, most_chars: int = 10**6) -> list[tuple[str, str]]:
    return [(each.path, each.kind) for each in changes.take(most, most_chars)[0]]


@pytest.mark.parametrize("kinds", [("changed", "changed"), ("deleted", "created")])
def test_two_changes_of_what_stays_are_one(kinds: tuple[str, str]) -> None:
    changes = Changes()
    for kind in kinds:
        changes.note("a", kind, directory=False)
    assert taken(changes) == [("a", "changed")]
    assert not changes


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans())), st.sets(st.sampled_from("abc")))
def test_the_reports_lead_from_what_was_there_to_what_is_there(steps: list[tuple[str, bool]], before: set[str]) -> None:
    """A file is made, changed or removed at random; a reader of the reports knows at each moment which are there."""
    there, known, changes = set(before), set(before), Changes()
    for path, is_write in steps:
        if is_write:
            changes.note(path, "changed" if path in there else "created", directory=False)
            there.add(path)
        elif path in there:
            changes.note(path, "deleted", directory=False)
            there.remove(path)
        if path == "c":  # a report now and then
            known = after(known, taken(changes))
    assert after(known, taken(changes)) == there


def after(known: set[str], reports: list[tuple[str, str]]) -> set[str]:
    for path, kind in reports:
        assert (path in known) is (kind != "created"), "a report fits to the one before"
        known = known - {path} if kind == "deleted" else known | {path}
    return known


def test_reports_are_bounded_and_keep_the_order() -> None:
    changes = Changes()
    for number in range(10):
        changes.note(f"file-{number}", "created", directory=False)
    assert [path for path, _ in taken(changes, most=3)] == ["file-0", "file-1", "file-2"]
    assert [path for path, _ in taken(changes, most_chars=13)] == ["file-3", "file-4"]
    assert len(taken(changes, most_chars=0)) == 1, "one always goes, or none ever would"
    assert len(taken(changes)) == 4


def test_too_many_are_forgotten_and_that_is_said_once() -> None:
    changes = Changes()
    for number in range(MAX_WAITING + 1):
        changes.note(str(number), "created", directory=False)
    assert changes
    assert changes.take(1000, 1000) == ([], True)
    changes.note("next", "created", directory=True)
    (report,), overflowed = changes.take(1000, 1000)
    assert (report.path, report.directory, overflowed) == ("next", True, False)
