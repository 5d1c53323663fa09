"""Approvals: who may decide what, how long a request waits, and how many there may be."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from executor_server.core import NotFound, Principal
from executor_server.policy.approvals import (
    Approval,
    ApprovalKind,
    ApprovalObserver,
    Approvals,
    Decision,
    Ruling,
    Wanted,
)

ADMIN = Principal("local", "admin", is_admin=True)
ANNA = Principal("a", "token:anna", roles=("approver",))
BERT = Principal("b", "token:bert", roles=("approver",))
AGENT = Principal("a", "token:agent")
RULE = "profiles.p.tools.ask"


class Notes(ApprovalObserver):
    def __init__(self) -> None:
        self.told: list[str] = []

    def approval_requested(self, approval: Approval) -> None:
        self.told.append(f"requested {approval.what}")

    def approval_decided(self, approval: Approval, ruling: Ruling) -> None:
        self.told.append(f"{ruling.decision} {approval.what} by {ruling.by.name if ruling.by else 'nobody'}")

    def approval_refused(self, approval: Approval, ruling: Ruling) -> None:
        self.told.append(f"refused {approval.what}")


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def approvals(notes: Notes) -> Approvals:
    return Approvals(notes)


@asynccontextmanager
async def connected(approvals: Approvals, principal: Principal) -> AsyncGenerator[AsyncGenerator[tuple[Approval, ...]]]:
    async with aclosing(approvals.watch(principal)) as lists:
        await anext(lists)
        yield lists


def ask(
    approvals: Approvals,
    what: str = "delete",
    *,
    tenant: str = "a",
    session: str = "s",
    wait_s: float = 60,
    **more: Any,
) -> Coroutine[Any, Any, Ruling]:
    return approvals.ask(tenant, session, "e", Wanted(ApprovalKind.TOOL, what, RULE), wait_s, **more)


async def begun(work: Coroutine[Any, Any, Ruling]) -> asyncio.Task[Ruling]:
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


async def test_without_anybody_who_may_decide_a_request_is_denied_at_once(approvals: Approvals, notes: Notes) -> None:
    async with connected(approvals, BERT), connected(approvals, AGENT):
        ruling = await ask(approvals)

    assert (ruling.decision, ruling.approved) == (Decision.DENIED, False)
    assert "nobody who may approve is connected" in ruling.reason
    assert notes.told == ["refused delete"]


@pytest.mark.parametrize("approver", [ADMIN, ANNA])
async def test_a_decision_reaches_all_who_wait_for_the_same(
    approvals: Approvals, notes: Notes, approver: Principal
) -> None:
    async with connected(approvals, approver) as lists:
        first, second = await begun(ask(approvals)), await begun(ask(approvals))
        (waiting,) = await anext(lists)
        approvals.decide(approver, waiting.approval_id, Decision.ONCE)

        assert [(await each).decision for each in (first, second)] == [Decision.ONCE] * 2
        assert await anext(lists) == ()
    assert (waiting.tenant, waiting.session_id, waiting.execution_id, waiting.what) == ("a", "s", "e", "delete")
    assert notes.told == ["requested delete", f"once delete by {approver.name}"]


async def test_the_first_decision_counts_and_strangers_have_none(approvals: Approvals) -> None:
    async with connected(approvals, ANNA):
        task = await begun(ask(approvals))
        (waiting,) = approvals.waiting(ANNA)
        assert approvals.waiting(BERT) == approvals.waiting(AGENT) == ()
        for stranger in (BERT, AGENT):
            with pytest.raises(NotFound):
                approvals.decide(stranger, waiting.approval_id, Decision.ONCE)
        approvals.decide(ANNA, waiting.approval_id, Decision.DENIED)
        with pytest.raises(NotFound):
            approvals.decide(ANNA, waiting.approval_id, Decision.ONCE)

        assert await task == Ruling(Decision.DENIED, "the approver refused it")


async def test_nobody_decides_in_time(approvals: Approvals, notes: Notes) -> None:
    async with connected(approvals, ANNA):
        ruling = await ask(approvals, wait_s=0.01)
        assert "nobody decided within 0.01 s" in ruling.reason
        assert await ask(approvals, wait_s=60) == ruling, "the same is not asked again for a while"
    assert notes.told == ["requested delete", "denied delete by nobody"]


async def test_a_decision_for_the_session_ends_with_it(approvals: Approvals) -> None:
    async with connected(approvals, ANNA):
        task = await begun(ask(approvals))
        approvals.decide(ANNA, approvals.waiting(ANNA)[0].approval_id, Decision.SESSION)
        assert (await task).decision is Decision.SESSION
    assert (await ask(approvals)).decision is Decision.SESSION
    assert not (await ask(approvals, session="other")).approved
    assert not (await ask(approvals, tenant="b")).approved
    approvals.end_session("a", "s")
    assert not (await ask(approvals)).approved


async def test_a_session_that_ends_denies_what_it_waits_for(approvals: Approvals) -> None:
    async with connected(approvals, ANNA):
        task, other = await begun(ask(approvals)), await begun(ask(approvals, session="other"))
        approvals.end_session("a", "s")
        assert "ended" in (await task).reason
        assert [each.session_id for each in approvals.waiting(ANNA)] == ["other"]
        approvals.close()
        assert "stops" in (await other).reason


async def test_a_cancelled_request_is_withdrawn_and_can_be_made_again(approvals: Approvals) -> None:
    async with connected(approvals, ANNA):
        one, other = await begun(ask(approvals)), await begun(ask(approvals))
        one.cancel()
        await asyncio.wait([one])
        assert len(approvals.waiting(ANNA)) == 1
        other.cancel()
        await asyncio.wait([other])
        assert approvals.waiting(ANNA) == ()
        again = await begun(ask(approvals))
        approvals.decide(ANNA, approvals.waiting(ANNA)[0].approval_id, Decision.ONCE)
        assert (await again).approved


async def test_calls_with_an_id_are_decided_one_by_one(approvals: Approvals) -> None:
    async with connected(approvals, ANNA):
        tasks = [await begun(ask(approvals, call_id=call_id)) for call_id in ("1", "2")]
        first, second = approvals.waiting(ANNA)
        approvals.decide(ANNA, first.approval_id, Decision.ONCE)
        approvals.decide(ANNA, second.approval_id, Decision.DENIED)
        assert [(await task).approved for task in tasks] == [True, False]


async def test_one_session_cannot_fill_the_list(approvals: Approvals) -> None:
    async with connected(approvals, ADMIN) as lists:
        tasks = [await begun(ask(approvals, f"tool_{index}")) for index in range(10_000)]
        assert len(await anext(lists)) == 16
        assert sum(task.done() and "wait for one already" in task.result().reason for task in tasks) == 10_000 - 16
        many = [await begun(ask(approvals, session=str(index))) for index in range(300)]
        assert len(approvals.waiting(ADMIN)) == 256, "one tenant leaves room for the others"
        other = await begun(ask(approvals, tenant="b"))
        assert len(approvals.waiting(ADMIN)) == 257
        approvals.close()
        await asyncio.wait([*tasks, *many, other])


@pytest.mark.parametrize(
    "hostile",
    ["\x1b[2Jx", "a\u202eb", "p\u0430ypal.com", "a\nb", "\ud800"],
    ids=["escape", "rtl", "homoglyph", "line", "half"],
)
async def test_a_text_is_shown_as_printable_ascii(approvals: Approvals, hostile: str) -> None:
    async with connected(approvals, ANNA):
        task = await begun(ask(approvals, hostile))
        (waiting,) = approvals.waiting(ANNA)
        assert waiting.what.isascii() and waiting.what.isprintable() and "\\" in waiting.what
        approvals.close()
        await task


async def test_what_is_too_long_to_be_shown_is_denied(approvals: Approvals) -> None:
    async with connected(approvals, ANNA):
        assert "too long" in (await ask(approvals, "x" * 4096)).reason
        assert "too long" in (await ask(approvals, "\u0430" * 200)).reason


async def test_a_caller_that_repeats_its_request_finds_the_decision(approvals: Approvals, notes: Notes) -> None:
    def check() -> Ruling | None:
        return approvals.check("a", "", "request", Wanted(ApprovalKind.PACKAGE, "requests", RULE), 60)

    async with connected(approvals, ANNA):
        assert check() is None is check()
        (waiting,) = approvals.waiting(ANNA)
        assert (waiting.session_id, waiting.request_id) == ("", "request")
        approvals.decide(ANNA, waiting.approval_id, Decision.ONCE)
        assert check() == check() == Ruling(Decision.ONCE)
        approvals.used("a", "", "request")
        assert check() is None
        approvals.close()
    assert notes.told[:2] == ["requested requests", "once requests by token:anna"]


async def test_nothing_is_kept_of_a_decision_for_a_session_that_is_not_made_yet(approvals: Approvals) -> None:
    """An empty set of remembered decisions was kept for each such request, without end."""

    def sets() -> int:
        return sum(type(each) is set for each in gc.get_objects())

    async with connected(approvals, ANNA):
        before = sets()
        for number in range(100):
            wanted, request = Wanted(ApprovalKind.PACKAGE, "requests", RULE), f"request-{number}"
            assert approvals.check("a", "", request, wanted, 60) is None
            approvals.decide(ANNA, approvals.waiting(ANNA)[0].approval_id, Decision.SESSION)
            assert approvals.check("a", "", request, wanted, 60) == Ruling(Decision.SESSION)
            approvals.used("a", "", request)
        assert sets() - before < 50


async def test_a_patient_request_waits_for_an_approver_to_come(approvals: Approvals) -> None:
    task = await begun(ask(approvals, patient=True))
    async with aclosing(approvals.watch(ANNA)) as lists:
        (waiting,) = await anext(lists)
        approvals.decide(ANNA, waiting.approval_id, Decision.ONCE)
    assert (await task).approved
