"""From a name to an address: resolved once, bounded in number and time, forgotten soon."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest

from executor_server.guest.egress import reasons
from executor_server.guest.egress.dial import Dialer, DirectConnector
from executor_server.guest.egress.host_names import Target
from executor_server.guest.egress.protocols import Dialled, Limits
from executor_server.guest.egress.refusals import Refusal
from tests.support.egress_engine import Addresses, Names
from tests.support.polling import eventually_async


class Unconnected:
    """Gives a socket that is connected to nothing, and notes the addresses."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
        self.addresses.append(address)
        sock = socket.socket()
        sock.close()
        return sock


def _dialer(names: Names | None, addresses: Addresses | None = None, **limits: float) -> tuple[Dialer, Unconnected]:
    connector = Unconnected()
    return Dialer(names, addresses or Addresses(), connector, Limits(**limits)), connector  # type: ignore[arg-type]


async def _dial(dialer: Dialer, target: Target) -> Dialled:
    return await dialer.connect(target, await dialer.find(target))


async def test_cache_holds_the_last_names_only_and_for_a_short_time() -> None:
    names = Names()
    for number in range(5):
        names.answers[f"{number}.example"] = [[f"192.0.2.{number}"]]
    dialer, _ = _dialer(names, cached_names=2)
    for number in (0, 1, 0, 2, 3, 3, 0):
        await _dial(dialer, Target(f"{number}.example", 443))
    assert names.asked == ["0.example", "1.example", "2.example", "3.example", "0.example"]
    names.asked.clear()
    dialer, _ = _dialer(names, cache_s=-1)
    await _dial(dialer, Target("0.example", 443))
    await _dial(dialer, Target("0.example", 443))
    assert names.asked == ["0.example"] * 2


async def test_resolutions_in_flight_are_bounded_and_those_that_wait_count_their_time() -> None:
    names = Names()
    hosts = [f"{number}.hangs.example" for number in range(50)]
    names.hanging = set(hosts)
    dialer, _ = _dialer(names, resolutions=4, resolve_s=0.05)
    results = await asyncio.gather(*(_dial(dialer, Target(host, 443)) for host in hosts), return_exceptions=True)
    assert {result.reason for result in results if isinstance(result, Refusal)} == {reasons.RESOLVER_TIMEOUT}
    assert len(results) == len(hosts)
    assert names.most_in_flight == 4
    assert names.in_flight == 0


async def test_a_look_up_is_shared_by_all_who_wait_and_ends_with_the_last_of_them() -> None:
    names = Names()
    names.hanging = {"hangs.example"}
    names.answers["quick.example"] = [["192.0.2.1"]]
    dialer, _ = _dialer(names, resolutions=2)
    waiting = [asyncio.create_task(_dial(dialer, Target("hangs.example", 443))) for _ in range(60)]
    await names.hung.wait()
    await _dial(dialer, Target("quick.example", 443))
    assert names.asked == ["hangs.example", "quick.example"]
    for each in waiting[1:]:
        each.cancel()
    await asyncio.gather(*waiting[1:], return_exceptions=True)
    assert names.in_flight == 1
    waiting[0].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await eventually_async(lambda: names.in_flight == 0)


async def test_no_more_addresses_of_a_name_are_tried_than_the_limit() -> None:
    names = Names()
    names.answers["a.example"] = [[f"192.0.2.{number}" for number in range(200)]]

    class Refusing(Unconnected):
        async def connect(self, target: Target, address: str, deadline: float) -> socket.socket:
            await super().connect(target, address, deadline)
            raise ConnectionRefusedError(111, "Connection refused")

    connector = Refusing()
    dialer = Dialer(names, Addresses(), connector, Limits(addresses=3))
    with pytest.raises(Refusal) as refused:
        await _dial(dialer, Target("a.example", 443))
    assert refused.value.reason == reasons.UNREACHED
    assert connector.addresses == ["192.0.2.0", "192.0.2.1", "192.0.2.2"]


async def test_without_a_resolver_the_connector_gets_the_name_alone() -> None:
    dialer, connector = _dialer(None)
    assert (await _dial(dialer, Target("a.example", 443))).address == ""
    assert connector.addresses == [""]
    addresses = Addresses()
    addresses.refused["127.0.0.1"] = "is a loopback address"
    dialer, connector = _dialer(None, addresses)
    with pytest.raises(Refusal):
        await _dial(dialer, Target("127.0.0.1", 443))
    assert connector.addresses == []


@pytest.mark.parametrize("address", ["localhost", "127.1", "0x7f000001", "", "a.example", "127.0.0.1\x00"])
async def test_direct_connector_takes_literal_addresses_only(address: str) -> None:
    """`connect` would resolve anything else by itself, behind the classifier."""
    with pytest.raises(ValueError, match="does not appear to be"):
        await DirectConnector().connect(Target("a.example", 9), address, 0)


async def test_resolver_that_lies_about_its_type_reaches_nothing() -> None:
    class Lying(Names):
        async def resolve(self, host: str) -> Sequence[str]:
            return ["localhost"]

    class Literal(Addresses):
        def why_refused(self, address: str) -> str | None:
            return None if address[0].isdigit() else "is no address"

    dialer, connector = _dialer(Lying(), Literal())
    with pytest.raises(Refusal):
        await _dial(dialer, Target("a.example", 443))
    assert connector.addresses == []
