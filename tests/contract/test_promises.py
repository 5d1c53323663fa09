"""The table of promises agrees with the tests: each promise is proved on every backend that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.inside import absent
from tests.contract.marks import proof_of
from tests.contract.promises import BACKENDS, BY_ID, PROMISES, TOPICS


def test_every_test_of_the_suite_proves_something(request: pytest.FixtureRequest) -> None:
    """Checks the tests that are collected now."""
    silent = [
        item.nodeid
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path.parent == Path(__file__).parent
        and item.path != Path(__file__)
        and proof_of(item) is None
    ]
    assert silent == []


def test_the_table_is_whole() -> None:
    assert len(BY_ID) == len(PROMISES), "an id names one promise"
    for promise in PROMISES:
        assert promise.sentence.endswith(".") and promise.topic in TOPICS
        assert set(promise.otherwise) <= set(BACKENDS)
        assert promise.proved_on and set(promise.proved_on) <= set(BACKENDS)
        for otherwise in promise.otherwise.values():
            assert otherwise.why.endswith(".")


def test_every_test_that_does_not_run_through_a_front_is_there() -> None:
    assert absent() == []
