"""The edge of a daemon for each test of it; modules that need another one define their own.

EXECUTOR_TEST_FLEET=1 puts a front of two nodes in its place (behind_front.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rpc.edge import Edge, serving
from tests.support.fleet_daemon import wanted

NOT_BEHIND_A_FRONT = {
    "test_edge_errors.py::test_a_retry_delay_is_said": (
        "a front says BACKEND_FULL with the shortest wait of all nodes: tests/rpc/fleet/test_nodes_that_fail.py"
    ),
    "test_edge_errors.py::test_each_refusal_has_its_status[error4-UNAUTHENTICATED]": (
        "a node denies its front, and never a client: tests/rpc/test_fleet_link.py"
    ),
    "test_edge_requests.py::test_a_field_of_a_wrong_form_is_named[CreateSession-CreateSessionRequest-node_labels]": (
        "the labels of nodes are a wrong field for a daemon only: tests/rpc/fleet/test_nodes_that_fail.py"
    ),
    "test_admin.py::test_bytes_of_the_network_are_reported_beside_their_quota": (
        "a front adds up what its nodes report: tests/unit/fleet/membership/test_usage.py"
    ),
    "test_admin.py::test_every_call_is_recorded_before_its_effect": "a front and its nodes have a log each",
    "test_viewing.py::test_a_viewer_sees_as_much_as_the_profile_allows": "its looks are in the node's audit log",
    "test_watching_sessions.py::test_a_lost_session_says_later_why": "it kills a sandbox of the daemon",
    "test_watching_sessions.py::test_a_session_is_inspected_with_what_is_in_it": "its looks are in the node's audit log",
    "test_watching_sessions.py::test_the_state_of_the_daemon_is_described": (
        "a front describes its nodes together: tests/integration/test_fleet_approvals.py"
    ),
    **{
        f"test_edge_auth.py::test_a_credential_may_do_what_its_roles_allow_and_nothing_else[{case}]": (
            "a front follows its nodes where the AdminService of this test answers"
        )
        for case in ("roles2-False-admin_calls2", "roles3-False-admin_calls3", "roles4-True-admin_calls4")
    },
    "test_admin.py::test_the_command_line_kills_drains_resumes_and_reloads": (
        "the command for a front names a node: tests/integration/test_fleet_front.py"
    ),
}
"""Tests, and modules of tests, of promises that a front does not make, and why."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.removeprefix("tests/rpc/")
        reason = NOT_BEHIND_A_FRONT.get(name) or NOT_BEHIND_A_FRONT.get(name.partition("::")[0])
        if reason is not None and wanted():
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
async def edge(tmp_path: Path) -> AsyncIterator[Edge]:
    async with serving(tmp_path) as edge:
        yield edge
