"""The console of a fleet's front: its nodes, and a drain that moves a session."""

from __future__ import annotations

import re

from tests.support.console import running_console
from tests.support.fleet_daemon import NODES, fleet_daemon
from tests.support.polling import eventually


def test_a_drained_node_gives_its_session_to_another() -> None:
    with (
        fleet_daemon() as front,
        running_console(front, "--actions") as console,
        console.browser() as browser,
        front.client() as client,
        client.create_session(detached=True) as session,
    ):
        session.execute("x = 7")
        node = session.info.node
        page = browser.get("/fleet")
        assert all(f"/actions/drain?node={each}" in page for each in NODES)
        done = browser.post("/actions/drain", node=node, move="yes")
        moved = re.search(rf"{session.session_id} was moved to (\S+)\.", done.text)
        assert moved is not None, done.text
        with client.get_session(moved[1]) as other:
            assert (other.execute("x").output, other.info.node != node) == (7, True)
        assert eventually(lambda: f"/actions/resume?node={node}" in browser.get("/fleet"))
        assert browser.post("/actions/resume", node=node).status_code == 200
        assert browser.post("/actions/drain").status_code == 400
