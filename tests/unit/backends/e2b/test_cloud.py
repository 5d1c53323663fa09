"""Every error of the SDK becomes one of a few failures, whose texts hold no secret."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator

import pytest

e2b = pytest.importorskip("e2b")
import httpx  # noqa: E402 - installed with the SDK

from executor_server.backends.e2b.cloud import Access, Cloud  # noqa: E402
from executor_server.backends.e2b.failures import (  # noqa: E402
    CloudFailure,
    CommandFailed,
    Failed,
    Final,
    KeyRefused,
    Missing,
    NotRunning,
    TryLater,
    Unanswered,
)

KEY = "e2b_" + "c0ffee" * 7


@pytest.fixture
def cloud() -> Iterator[Cloud]:
    yield Cloud(Access(KEY, "http://127.0.0.1:9", "http://127.0.0.1:9", request_timeout_s=1.0, concurrency=2))


async def translated(cloud: Cloud, error: BaseException) -> CloudFailure:
    with pytest.raises(CloudFailure) as raised:
        async with cloud.translated():
            raise error
    return raised.value


def with_status(status: int) -> Exception:
    error: Exception = e2b.SandboxException(f"{status}: no", status_code=status)
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (e2b.AuthenticationException("401"), KeyRefused),
        (e2b.SandboxNotFoundException("no"), Missing),
        (e2b.NotFoundException("no"), Missing),
        (e2b.SandboxNotRunningException("was not found"), NotRunning),
        (e2b.TimeoutException("slow"), Unanswered),
        (e2b.RateLimitException("429"), TryLater),
        (e2b.ServiceBusyException("503"), TryLater),
        (e2b.InvalidArgumentException("no"), Final),
        (e2b.NotEnoughSpaceException("full"), Final),
        (e2b.TemplateException("old"), Final),
        (with_status(400), Final),
        (with_status(403), Final),
        (with_status(404), Missing),
        (with_status(409), CloudFailure),
        (with_status(500), Failed),
        (with_status(502), Failed),
        (httpx.ConnectError("refused"), Unanswered),
        (httpx.ReadTimeout("slow"), Unanswered),
        (httpx.RemoteProtocolError("cut"), Unanswered),
        (ConnectionResetError(), Unanswered),
        (KeyError("clientID"), CloudFailure),
        (json.JSONDecodeError("no", "x", 0), CloudFailure),
        (AttributeError("'str' object has no attribute 'get'"), CloudFailure),
        (Exception("Command ended without an end event"), CloudFailure),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
async def test_each_error_has_its_failure(cloud: Cloud, error: Exception, kind: type[CloudFailure]) -> None:
    assert type(await translated(cloud, error)) is kind


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (TimeoutError(), "E2B does not answer in time"),  # as asyncio raises it
        (httpx.ReadTimeout(""), "E2B does not answer in time"),
        (ConnectionResetError(), "E2B can't be reached"),
        (httpx.ConnectError("refused"), "E2B can't be reached: refused"),
    ],
    ids=repr,
)
async def test_the_text_says_what_happened_also_when_the_error_has_none(
    cloud: Cloud, error: Exception, text: str
) -> None:
    assert str(await translated(cloud, error)) == text


async def test_a_request_past_its_time_is_said_to_be_unanswered(cloud: Cloud) -> None:
    with pytest.raises(Unanswered, match="does not answer in time"):
        async with cloud.request(-1.0):  # no time is left
            await asyncio.Event().wait()


async def test_a_failure_is_not_translated_again(cloud: Cloud) -> None:
    failure = CommandFailed(3, "why")
    assert await translated(cloud, failure) is failure


async def test_a_cancellation_that_the_sdk_mistakes_for_a_timeout_stays_one(cloud: Cloud) -> None:
    waiting = asyncio.Event()

    async def asked() -> None:
        async with cloud.translated():
            try:
                waiting.set()
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                raise e2b.TimeoutException("the request was cancelled") from None

    task = asyncio.create_task(asked())
    await waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("answer", [None, KeyError("clientID"), CommandFailed(3, "why")])
async def test_a_cancellation_that_comes_with_the_answer_is_not_lost(cloud: Cloud, answer: Exception | None) -> None:
    """CPython 3.11 loses it in `asyncio.wait_for`, which the SDK's HTTP client waits with, and returns the answer. A daemon
    that swept its cloud at short intervals never stopped, because the sweeper went on after it was cancelled."""
    waiting = asyncio.Event()
    answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    rounds = 0

    async def ask_forever() -> None:
        nonlocal rounds
        while rounds < 10:
            rounds += 1
            with contextlib.suppress(CloudFailure):
                async with cloud.request():
                    waiting.set()
                    await asyncio.wait_for(answered, 10)

    task = asyncio.create_task(ask_forever())
    await waiting.wait()
    if answer is None:
        answered.set_result(None)
    else:
        answered.set_exception(answer)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rounds == 1


async def test_a_task_that_was_cancelled_can_still_ask_while_it_cleans_up(cloud: Cloud) -> None:
    waiting = asyncio.Event()

    async def asked() -> CloudFailure:
        try:
            waiting.set()
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            async with cloud.request():
                pass
            return await translated(cloud, KeyError("clientID"))
        raise AssertionError("it was not cancelled")

    task = asyncio.create_task(asked())
    await waiting.wait()
    task.cancel()
    assert isinstance(await task, CloudFailure)


async def test_a_cancellation_passes_through(cloud: Cloud) -> None:
    with pytest.raises(asyncio.CancelledError):
        async with cloud.translated():
            raise asyncio.CancelledError


@pytest.mark.parametrize(
    "said",
    [
        f"401: the key {KEY} is not known",
        "token " + "a1B2" * 8,
        "no route to http://me:hush@proxy.example/",
        "x" * 119 + KEY,
        "x" * 8180 + KEY,
    ],
)
async def test_secrets_are_removed_from_the_cloud_s_texts(cloud: Cloud, said: str) -> None:
    failure = await translated(cloud, e2b.SandboxException(said))
    assert failure.__cause__ is None
    assert failure.__suppress_context__
    for secret in (KEY, KEY[:12], "a1B2a1B2", "hush"):
        assert secret not in str(failure)


async def test_a_text_of_the_cloud_becomes_one_short_line(cloud: Cloud) -> None:
    failure = await translated(cloud, e2b.SandboxException("no\n\x1b[2J\u2028 at all " * 1000))
    assert str(failure).isprintable()
    assert len(str(failure)) < 300


def test_the_key_is_not_shown(cloud: Cloud) -> None:
    assert KEY not in repr(cloud.access)
    assert KEY not in repr(vars(cloud))
