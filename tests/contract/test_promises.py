"""The table of promises agrees with the tests: each promise is proved on every backend that keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.inside import absent
from tests.contract.marks import proof_of
from tests.contract.promises import BACKENDS, BY_ID, PROMISES, TOPICS, unproved

HERE = Path(__file__).parent


def test_every_test_proves_a_promise_and_every_promise_has_its_tests(request: pytest.FixtureRequest) -> None:
    """Checks the tests that are collected now; the promises, when those are all of the contract."""
    ours = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path.parent == HERE]
    proofs = {item: proof_of(item) for item in ours if item.path != Path(__file__)}
    assert [item.nodeid for item, proof in proofs.items() if proof is None] == []
    if {item.path for item in ours} == set(HERE.glob("test_*.py")):
        proved = [proof for proof in proofs.values() if proof is not None]
        assert unproved((name, proof.backend, proof.instead) for proof in proved for name in proof.promise_ids) == []


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
