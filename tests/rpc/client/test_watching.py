"""Watches that go on for days: of sessions by `executor top`, and of approvals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from executor_client import AsyncExecutorClient, ExecutorClient, cli
from tests.support.fake_daemon import TOKEN, FakeDaemon, Refusal

YEAR_S = 365 * 86_400.0


@pytest.fixture(autouse=True)
def address(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXECUTOR_ADDRESS", daemon.address)
    monkeypatch.setenv("EXECUTOR_TOKEN", TOKEN)


def top() -> None:
    assert cli.main(["top"]) == 0


def approvals() -> None:
    with ExecutorClient() as client:
        assert list(client.watch_approvals()) == [()]


def approvals_in_asyncio() -> None:
    async def watch() -> None:
        async with AsyncExecutorClient() as client:
            assert [waiting async for waiting in client.watch_approvals()] == [()]

    asyncio.run(watch())


def own_approvals() -> None:
    with ExecutorClient(on_approval=lambda _: "deny") as client, client.create_session():
        pass  # it watches before it creates the session


@pytest.mark.parametrize("watch", [top, approvals, approvals_in_asyncio, own_approvals])
def test_a_watch_has_no_deadline(daemon: FakeDaemon, watch: Callable[[], None]) -> None:
    """A deadline of a day ended `executor top` and `executor approvals` with an error."""
    watch()
    (time_s,) = daemon.watched_for_s.values()
    assert time_s > YEAR_S


def test_top_goes_on_when_the_status_does_not_come_in_time(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon that took longer than two seconds once ended `executor top` with an error."""
    daemon.refusals["GetStatus"].append(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED))
    top()
    assert capsys.readouterr().out.startswith("sessions 0, busy 0\n")
