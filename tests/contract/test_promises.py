"""The table of promises and the tests belong together: each promise is proved wherever it is said to be kept."""

from __future__ import annotations

import pytest

from tests.contract.marks import Proof
from tests.contract.promises import BACKENDS, BY_ID, PROMISES, TOPICS, Keeping, Promise


@pytest.fixture(scope="module")
def proofs() -> list[Proof]:
    """All of the suite, whatever part of it runs now."""
    from tests.contract.proofs import collected

    return collected()


def _proved(proofs: list[Proof], promise: Promise, backend: str, *, instead: bool) -> bool:
    return any(
        proof.backend == backend and proof.instead is instead and promise.promise_id in proof.promise_ids
        for proof in proofs
    )


def test_every_promise_that_is_kept_has_a_test_on_the_backend_that_keeps_it(proofs: list[Proof]) -> None:
    missing = [
        (promise.promise_id, backend)
        for promise in PROMISES
        for backend in BACKENDS
        if promise.is_proved_on(backend) and not _proved(proofs, promise, backend, instead=False)
    ]
    assert missing == []


def test_what_is_done_instead_of_a_promise_that_is_not_kept_has_a_test(proofs: list[Proof]) -> None:
    missing = [
        (promise.promise_id, backend)
        for promise in PROMISES
        for backend in BACKENDS
        if promise.keeping(backend) is Keeping.NOT_KEPT and not _proved(proofs, promise, backend, instead=True)
    ]
    assert missing == []


def test_no_test_proves_what_the_table_says_is_not_kept(proofs: list[Proof]) -> None:
    wrong = [
        proof
        for proof in proofs
        for promise_id in proof.promise_ids
        if (BY_ID[promise_id].keeping(proof.backend) is Keeping.NOT_KEPT) is not proof.instead
    ]
    assert wrong == []


def test_the_table_is_whole() -> None:
    assert len(BY_ID) == len(PROMISES), "an id names one promise"
    for promise in PROMISES:
        assert promise.sentence.endswith(".") and promise.topic in TOPICS
        assert set(promise.otherwise) <= set(BACKENDS)
        assert promise.proved_on and set(promise.proved_on) <= set(BACKENDS)
        for otherwise in promise.otherwise.values():
            assert otherwise.keeping is not Keeping.KEPT and otherwise.why.endswith(".")
