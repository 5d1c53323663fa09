"""The gateway closes each client that it opens, whatever becomes of the requests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

from executor_client.errors import ResourceExhaustedError
from executor_server.gateway.clients import ALL_VISITS_MAX, REQUESTS_MAX, VISITS_MAX, Clients


@dataclass
class FakeClient:
    """A client of a daemon that answers when the test says so."""

    may_answer: asyncio.Event
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    is_closed: bool = False

    async def get_policy(self) -> None:
        self.asked.set()
        await self.may_answer.wait()

    async def close(self) -> None:
        self.is_closed = True


async def test_a_client_whose_requests_were_cancelled_serves_the_next_one() -> None:
    """It was neither kept nor closed. The other client's verification ends after its own."""
    may_answer = asyncio.Event()
    made = {"token": FakeClient(may_answer), "other": FakeClient(may_answer)}
    unused = dict(made)
    async with Clients(lambda token: cast("Any", unused.pop(token))) as clients:
        request, other = (asyncio.create_task(clients.of(token)) for token in made)
        for each in made.values():
            await each.asked.wait()
        request.cancel()
        may_answer.set()
        await other
        assert cast("Any", await clients.of("token")) is made["token"]
        assert request.cancelled()
    assert all(each.is_closed for each in made.values())


async def test_a_client_in_verification_at_the_gateways_end_is_closed() -> None:
    client = FakeClient(asyncio.Event())
    async with Clients(lambda _token: cast("Any", client)) as clients:
        request = asyncio.create_task(clients.of("token"))
        await client.asked.wait()
        request.cancel()
        await asyncio.wait({request})
        client.may_answer.set()
    assert client.is_closed


async def test_visitors_of_ports_and_the_owner_have_places_of_their_own() -> None:
    """Visitors need no token, and took all places of the owner's requests."""
    may_answer, may_end = asyncio.Event(), asyncio.Event()
    may_answer.set()
    async with Clients(lambda _token: cast("Any", FakeClient(may_answer))) as clients:
        await clients.of("token")

        async def request(visited: str) -> None:
            with clients.request():
                await clients.of("token", visited)
                await may_end.wait()

        visits = [f"sandbox{number}" for number in range(ALL_VISITS_MAX // VISITS_MAX)] * (VISITS_MAX + 1)
        running = [asyncio.create_task(request(each)) for each in [*visits, "one more", *[""] * (REQUESTS_MAX + 1)]]
        refused, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        may_end.set()
        answers = await asyncio.gather(*running, return_exceptions=True)
        assert {running[number] for number, each in enumerate(answers) if each is not None} == refused
        reasons = [str(each) for each in answers if isinstance(each, ResourceExhaustedError)]
        assert [reason.split("requests ")[1].split(" at a time")[0] for reason in reasons] == [
            *["to the ports of one sandbox"] * (ALL_VISITS_MAX // VISITS_MAX),
            "to ports of sandboxes",
            "of a token",
        ]
        await request("sandbox0")
