"""Marks by which a test of the contract names the promises that it proves, and the backends that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from tests.contract.promises import BACKENDS, BY_ID, Keeping

# A test without a mark proves no promise; it runs on these.
_UNMARKED = ("local", "docker")


def promise(*promise_ids: str) -> pytest.MarkDecorator:
    """Marks a test with the promises that it proves. It runs on the backends that keep all of them."""
    return pytest.mark.promise(*_known(promise_ids))


def instead(*promise_ids: str) -> pytest.MarkDecorator:
    """Marks a test of the behaviour in place of promises that are not kept. It runs on the backends that keep none."""
    return pytest.mark.instead(*_known(promise_ids))


def _known(promise_ids: tuple[str, ...]) -> tuple[str, ...]:
    unknown = [promise_id for promise_id in promise_ids if promise_id not in BY_ID]
    assert promise_ids and not unknown, f"no such promise: {unknown}"
    return promise_ids


@dataclass(frozen=True)
class Proof:
    """A test's backend, and the promises that it proves there; `instead`: the behaviour in place of a promise."""

    backend: str
    promise_ids: tuple[str, ...]
    instead: bool


def proof_of(item: pytest.Function) -> Proof | None:
    """Returns the proof; None when the test proves nothing."""
    proved = _named(item, "promise")
    replaced = _named(item, "instead")
    if not proved and not replaced:
        return None
    return Proof(backend_of(item), replaced or proved, bool(replaced))


def belongs(item: pytest.Function) -> bool:
    """True when the test is to run on its backend."""
    backend, proof = backend_of(item), proof_of(item)
    if proof is None:
        return backend in _UNMARKED
    promises = [BY_ID[promise_id] for promise_id in proof.promise_ids]
    if proof.instead:
        return all(each.keeping(backend) is Keeping.NOT_KEPT for each in promises)
    return all(each.is_proved_on(backend) for each in promises)


# Files whose tests are of the guest, which is the same on each backend. One that is the backend's is no such file:
# creation, egress, environments, leftovers, pauses and restarts.
OF_THE_GUEST = frozenset(
    f"test_{name}.py"
    for name in (
        *(
            "background",
            "branches",
            "budgets",
            "cpu_accounting",
            "displays",
            "drawing",
            "executions",
            "files",
            "fitness",
            "imports",
        ),
        *(
            "hostile_processes",
            "language_rules",
            "notebooks",
            "offline",
            "outcomes",
            "ports",
            "processes",
            "rest",
            "sandbox_tools",
            "savepoints",
            "state",
            "tools",
            "variables",
            "watches",
        ),
    )
)
# Those of them that meet what is the backend's: its signals, its memory, its number of processes, its transport.
MEET_THE_BACKEND = frozenset(
    (
        "test_a_branch_that_kills_the_interpreter_loses_the_variables_and_that_is_said",
        "test_a_connection_that_breaks_is_told_as_broken_and_not_as_ended",
        "test_a_killed_interpreter_is_a_crash",
        "test_a_session_is_charged_for_what_runs_up_to_its_end",
        "test_an_idle_session_whose_sandbox_is_ended_is_lost",
        "test_the_disk_is_bounded",
        "test_a_full_table_of_processes_has_no_room_for_a_savepoint",
        "test_a_full_terminal_that_no_client_reads_takes_keys_all_the_same",
        "test_a_process_can_neither_signal_nor_see_the_supervisor",
        "test_a_process_has_the_limits_of_the_interpreter",
        "test_a_shell_that_forks_without_end_ends_with_a_kill_of_its_tree",
        "test_a_timeout_ends_all_that_a_process_started",
        "test_a_tree_of_thousands_of_directories_is_refused_or_told_as_lost",
        "test_an_interpreter_that_forks_without_end_is_replaced_all_the_same",
        "test_files_of_the_workspace_go_back_too",
        "test_megabytes_arrive_whole_both_ways_and_others_go_on_meanwhile",
        "test_memory_that_ran_out_is_given_back_with_the_variables",
        "test_one_that_is_stopped_or_ignores_every_signal_is_ended_by_a_kill",
        "test_processes_outlive_interpreters_that_are_killed_one_after_the_other",
        "test_the_end_of_the_session_is_the_end_of_its_processes",
    )
)
_OTHERS = ("docker", "e2b")


def repeats(items: Iterable[pytest.Function]) -> Iterator[pytest.Function]:
    """Yields the tests of the guest on docker and e2b that prove there nothing but what one before them proves.

    All of them run on the local backend, and on the others with --all.
    """
    proved: set[tuple[str, str]] = set()
    for item in items:
        proof = proof_of(item)
        if item.path.name not in OF_THE_GUEST or proof is None or proof.backend not in _OTHERS:
            continue
        claims = {(proof.backend, promise_id) for promise_id in proof.promise_ids}
        if claims <= proved and item.originalname not in MEET_THE_BACKEND:
            yield item
        proved |= claims


def backend_of(item: pytest.Function) -> str:
    """Returns the backend of a test. A test that makes its own is about the guest, in local sandboxes."""
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return next((each for each in params if isinstance(each, str) and each in BACKENDS), "local")


def _named(item: pytest.Function, mark: str) -> tuple[str, ...]:
    """Reads the test's own marks, those of its case included; without any, its module's."""
    own = [each for each in item.own_markers if each.name == mark]
    return tuple(dict.fromkeys(name for each in own or item.iter_markers(mark) for name in each.args))
