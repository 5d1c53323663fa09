"""Watches that go on for days: of sessions by `executor top`, and of approvals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from executor_client import AsyncExecutorClient, DaemonError, ExecutorClient, UnavailableError, cli
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


def watched_approvals(client: ExecutorClient) -> None:
    list(client.watch_approvals())


def watched_approvals_in_asyncio(client: ExecutorClient) -> None:
    async def watch() -> None:
        async with AsyncExecutorClient() as asyncio_client:
            assert [waiting async for waiting in asyncio_client.watch_approvals()]

    asyncio.run(watch())


@pytest.mark.parametrize("code", [grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN])
@pytest.mark.parametrize("watch", [watched_approvals, watched_approvals_in_asyncio])
def test_a_stream_that_a_proxy_resets_is_a_lost_connection(
    daemon: FakeDaemon, watch: Callable[[ExecutorClient], None], code: grpc.StatusCode
) -> None:
    """It was an error of the daemon, which ended `executor top`, `executor approvals` and `on_approval`."""
    with ExecutorClient() as client:
        daemon.refusals["WatchApprovals"].append(Refusal(code))
        with pytest.raises(UnavailableError, match="the stream broke off") as raised:
            watch(client)
        assert raised.value.reason == ""
        daemon.refusals["WatchApprovals"].append(Refusal(code, "INTERNAL", incident_id="1f"))
        with pytest.raises(DaemonError, match="incident 1f"):
            watch(client)


def test_on_approval_goes_on_after_a_reset(daemon: FakeDaemon) -> None:
    daemon.refusals["WatchApprovals"].append(Refusal(grpc.StatusCode.INTERNAL))
    own_approvals()
    assert daemon.names().count("WatchApprovals") > 1


def test_top_goes_on_when_the_status_does_not_come_in_time(
    daemon: FakeDaemon, capsys: pytest.CaptureFixture[str]
) -> None:
    """A daemon that took longer than two seconds once ended `executor top` with an error."""
    daemon.refusals["GetStatus"].append(Refusal(grpc.StatusCode.DEADLINE_EXCEEDED))
    top()
    assert capsys.readouterr().out.startswith("sessions 0, busy 0\n")
