"""A real daemon as a node of a fleet: what its clients see while it is linked, killed, stopped, and without its front."""

from __future__ import annotations

from tests.support.backends import require
from tests.support.fake_front import control_of, front_of
from tests.support.node_daemon import node_daemon


async def test_a_node_serves_a_session_that_its_front_made() -> None:
    require("local")
    with node_daemon() as node:
        async with front_of(node.front_folder, node.link_address, node.name) as front:
            await front.control(control_of())
            made = await front.create()
            async with node.client() as client:
                session = await client.get_session(made.session_id)
                assert (await session.execute("1 + 1")).output == 2
