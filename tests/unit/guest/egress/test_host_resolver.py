"""Threads that resolve names: those of all sessions share them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from executor_server.guest.egress import host_resolver
from executor_server.guest.egress.host_resolver import HOST_THREADS, THREADS_PER_DOMAIN, HostResolver
from tests.support.polling import eventually_async


async def test_a_domain_whose_servers_do_not_answer_leaves_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also once its names are not waited for any more: getaddrinfo can't be interrupted."""
    answers, asked = threading.Event(), []

    def getaddrinfo(host: str) -> list[str]:
        asked.append(host)
        if host.endswith(".hangs.com"):
            assert answers.wait(60)
        return ["192.0.2.1"]

    monkeypatch.setattr(host_resolver, "_getaddrinfo", getaddrinfo)
    resolver = HostResolver()
    waiting = [asyncio.ensure_future(resolver.resolve(f"{n}.hangs.com")) for n in range(2 * HOST_THREADS)]
    try:
        assert await eventually_async(lambda: len(asked) == THREADS_PER_DOMAIN)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        later = asyncio.ensure_future(resolver.resolve("later.hangs.com"))
        async with asyncio.timeout(20):
            assert await resolver.resolve("a.other.com") == ["192.0.2.1"]
        assert len(asked) == THREADS_PER_DOMAIN + 1
    finally:
        answers.set()
    async with asyncio.timeout(20):
        assert await later == ["192.0.2.1"]
        assert [await resolver.resolve(f"{n}.hangs.com") for n in range(20)] == [["192.0.2.1"]] * 20
    assert await eventually_async(lambda: not resolver.turns)
