"""The tests of the contract that need the inside of the daemon's process, and so don't run through a front.

A test that is about the backend itself, or makes a daemon of its own, is found by its fixtures. Of the others, which
take `harness`, those that look behind its sessions are listed here. All that are not run through a front.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

_LISTENER = "it takes the sandbox's listener, as the daemon does for its egress proxy"

INSIDE: Mapping[str, Mapping[str, str]] = {
    "test_cpu_accounting.py": {
        "test_processes_that_run_between_executions_are_charged_meanwhile": "it observes the session in its process",
        "test_a_session_is_charged_for_what_runs_up_to_its_end": "it observes the session in its process",
        "test_a_prelude_is_charged_though_it_has_no_result": "it pings the guest in its process",
    },
    "test_egress.py": {
        "test_a_program_reaches_the_process_that_serves_its_listener": _LISTENER,
        "test_the_filter_of_system_calls_leaves_tcp_whole": _LISTENER,
        "test_many_connections_at_once_are_served": _LISTENER,
        "test_each_sandbox_has_a_listener_of_its_own": _LISTENER,
        "test_a_program_can_neither_take_nor_share_the_port": _LISTENER,
        "test_no_process_of_a_program_has_the_listener": _LISTENER,
        "test_a_program_can_not_open_the_listener_through_the_supervisor": _LISTENER,
        "test_a_sandbox_without_a_network_has_nothing_of_it": _LISTENER,
        "test_programs_find_the_proxy_and_the_authorities": "its authorities are the test's own",
        "test_the_authorities_are_readable_and_can_not_be_changed": "its authorities are the test's own",
    },
    "test_language_rules.py": {
        "test_rules_that_are_wider_again_hold_from_the_next_execution_on": "no policy widens the rules of a session",
        "test_results_say_what_their_sources_import": "the audit log has these imports, and no client",
    },
    "test_outcomes.py": {
        "test_a_hostile_source_costs_one_execution[nul]": "the form of a request is checked before: it is refused",
        "test_a_broken_connection_loses_nothing": "it breaks the connection of the daemon to the guest",
        "test_an_orphaned_sandbox_ends_itself": "it breaks the connection of the daemon to the guest, for good",
    },
    "test_preload.py": {
        "test_a_kept_sandbox_has_imported_the_modules_before_its_session_does": "it tells a pool what to keep",
    },
    "test_tools.py": {
        "test_a_call_that_needs_an_approval_waits_with_its_clock": "it decides in its process",
    },
    "test_watches.py": {
        "test_more_than_can_wait_is_told_as_lost_and_the_watch_goes_on": "a client's connection holds what is to wait",
    },
}
"""By file and test, which may be one with a parameter, the reason."""


def reason_of(item: pytest.Function) -> str:
    """Returns why a test can't run through a front; nothing when it can."""
    if "probe" in item.fixturenames:
        return "it makes, restarts and harms backends itself"
    if "front" not in item.fixturenames:
        return "it makes a daemon of its own, with images or sandboxes that no other test has"
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [item.originalname, *(f"{item.originalname}[{each}]" for each in params)]
    listed = INSIDE.get(item.path.name, {})
    return next((listed[name] for name in names if name in listed), "")


def absent() -> list[str]:
    """Lists the tests above that are not there."""
    folder = Path(__file__).parent
    texts = {file: (folder / file).read_text() for file in INSIDE}
    listed = [(file, test) for file, tests in INSIDE.items() for test in tests]
    return [f"{file}::{test}" for file, test in listed if f" {test.partition('[')[0]}(" not in texts[file]]
