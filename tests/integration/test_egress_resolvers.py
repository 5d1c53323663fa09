"""The proxy's resolver by DNS: servers that answer, lie, fail or hang."""

from __future__ import annotations

import asyncio
import os
import shlex
import socket
import sys
from pathlib import Path

import pytest

from executor_server.guest.egress.host_resolver import MAX_ADDRESSES
from executor_server.guest.egress.protocols import Unresolved
from executor_server.network.proxy import resolvers
from executor_server.network.proxy.resolvers import DnsResolver
from tests.support.internet.world import Internet

SOON_S = 30.0
_AS_THE_HOST = """
import asyncio, sys
from executor_server.guest.egress.host_resolver import HostResolver

async def resolve():
    return await HostResolver().resolve(sys.argv[1])

print(asyncio.run(resolve()))
"""


@pytest.fixture
def resolver(internet: Internet, monkeypatch: pytest.MonkeyPatch) -> DnsResolver:
    monkeypatch.setattr(resolvers, "_PAUSES_S", (0.2, 0.8))
    return DnsResolver([internet.resolver])


async def test_addresses_of_both_families_are_found(internet: Internet, resolver: DnsResolver) -> None:
    name = internet.name("files")
    internet.names.address(name, "10.1.2.3", "2001:db8::1")
    assert sorted(await resolver.resolve(name)) == ["10.1.2.3", "2001:db8::1"]


async def test_name_of_many_addresses_has_a_part_of_them(internet: Internet, resolver: DnsResolver) -> None:
    """The answer is too large for UDP, so this goes over TCP too."""
    name = internet.name("files")
    everything = {f"10.1.2.{number}" for number in range(200)}
    internet.names.address(name, *everything)
    found = await resolver.resolve(name)
    assert 0 < len(found) <= MAX_ADDRESSES
    assert set(found) <= everything
    assert any(question.over_tcp for question in internet.names.questions if question.name == name)


async def test_alias_leads_to_its_addresses(internet: Internet, resolver: DnsResolver) -> None:
    name = internet.name("files")
    internet.names.alias(name, "elsewhere.example", "10.1.2.3")
    assert await resolver.resolve(name) == ["10.1.2.3"]


async def test_forged_answers_are_not_taken(internet: Internet, resolver: DnsResolver) -> None:
    name = internet.name("files")
    internet.names.lie_first(name, "10.6.6.6", "10.1.2.3")
    assert "10.6.6.6" not in await resolver.resolve(name)


async def test_name_without_addresses_has_none(internet: Internet, resolver: DnsResolver) -> None:
    name = internet.name("files")
    internet.names.address(name)
    assert await resolver.resolve(name) == []


async def test_name_that_does_not_exist_is_said_to(internet: Internet, resolver: DnsResolver) -> None:
    with pytest.raises(Unresolved, match="does not exist"):
        await resolver.resolve("nothing.test-internet.example")


@pytest.mark.parametrize("code", ["SERVFAIL", "REFUSED"])
async def test_failure_of_the_server_is_told_from_a_missing_name(
    internet: Internet, resolver: DnsResolver, code: str
) -> None:
    name = internet.name("files")
    internet.names.fail(name, code)
    with pytest.raises((Unresolved, TimeoutError)) as caught:
        await resolver.resolve(name)
    assert "exist" not in str(caught.value)


@pytest.mark.parametrize("answer", [b"", b"\0", b"\x81\x80" + b"\xff" * 100, bytes(600)], ids=repr)
async def test_malformed_answer_is_no_answer(internet: Internet, resolver: DnsResolver, answer: bytes) -> None:
    name = internet.name("files")
    internet.names.malformed(name, answer)
    with pytest.raises((Unresolved, TimeoutError)):
        async with asyncio.timeout(SOON_S):
            await resolver.resolve(name)


async def test_server_that_hangs_is_given_up_and_others_are_served_meanwhile(
    internet: Internet, resolver: DnsResolver
) -> None:
    hanging, quick = internet.name("files"), internet.name("files")
    internet.names.hang(hanging)
    internet.names.address(quick, "10.1.2.3")
    waiting = [asyncio.ensure_future(resolver.resolve(hanging)) for _ in range(50)]
    assert await resolver.resolve(quick) == ["10.1.2.3"]
    for each in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(each, TimeoutError)


async def test_look_ups_at_one_time_are_bounded(
    internet: Internet, resolver: DnsResolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolvers, "_MAX_RUNNING", 3)
    name = internet.name("files")
    internet.names.hang(name)
    waiting = [asyncio.ensure_future(resolver.resolve(name)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="too many"):
        await resolver.resolve(name)
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_domain_whose_servers_hang_leaves_look_ups_to_others(
    internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of other tenants: all sessions share the look-ups."""
    monkeypatch.setattr(resolvers, "_MAX_RUNNING", 8)
    monkeypatch.setattr(resolvers, "_MAX_PER_DOMAIN", 4, raising=False)
    resolver = DnsResolver([internet.resolver])
    hanging = [f"{number}.hangs.example" for number in range(16)]
    for name in hanging:
        internet.names.hang(name)
    internet.names.address("a.answers.example", "10.1.2.3")
    waiting = [asyncio.ensure_future(resolver.resolve(name)) for name in hanging]
    try:
        await asyncio.sleep(0)
        assert await resolver.resolve("a.answers.example") == ["10.1.2.3"]
        assert not any(each.done() for each in waiting)
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    internet.names.address("17.hangs.example", "10.1.2.3")
    async with asyncio.timeout(SOON_S):
        assert await resolver.resolve("17.hangs.example") == ["10.1.2.3"]


@pytest.mark.parametrize("kind", ["one server", "two servers", "as the host"])
async def test_server_that_answers_within_the_time_that_the_proxy_waits_is_heard(
    internet: Internet, kind: str, tmp_path: Path
) -> None:
    """With the real times. The old ones were two seconds for each server, and twice that for libc's."""
    name = internet.name("files")
    internet.names.address(name, "10.1.2.3")
    internet.names.delays_s[name] = 4.5  # between two tries of libc
    if kind != "as the host":
        resolver = DnsResolver([internet.resolver] * (2 if kind == "two servers" else 1))
        assert await resolver.resolve(name) == ["10.1.2.3"]
        return
    if os.geteuid() != 0:
        pytest.skip("only root can have another resolv.conf without a helper")
    (tmp_path / "resolv.conf").write_text(f"nameserver {internet.resolver.rpartition(':')[0]}\n")
    mount = f"mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    command = f"{mount} && exec {sys.executable} -c {shlex.quote(_AS_THE_HOST)} {name}"
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "sh", "-c", command), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    assert out == b"['10.1.2.3']\n"


async def test_lost_packet_is_sent_again(internet: Internet, resolver: DnsResolver) -> None:
    name = internet.name("files")
    internet.names.lose_first(name, "10.1.2.3")
    assert await resolver.resolve(name) == ["10.1.2.3"]


async def test_later_server_is_asked_where_the_first_does_not_answer(
    internet: Internet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolvers, "_PAUSES_S", (0.2, 20.0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        both = DnsResolver([f"127.0.0.1:{silent.getsockname()[1]}", internet.resolver])
        assert await both.resolve(internet.name("files")) == [internet.address]
