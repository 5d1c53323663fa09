"""A session's life in the double of E2B's cloud, with one fault in it, and what must be true of each.

Several lives are led at a time, each by a worker of its own with a cloud of its own that has room for one sandbox: so
whatever a life leaves behind, there or in the daemon's books, makes the next one of its worker fail.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from executor_server.backends.channel.daemon_channel import READY_TIME_S
from executor_server.backends.e2b import E2BBackend
from executor_server.core.errors import (
    ExecutorError,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    Unavailable,
)
from executor_server.sessions.connection import ConnectionState, ConnectionTimes
from executor_server.sessions.session import Session
from tests.chaos.e2b_faults import REQUEST_TIMEOUT_S, Case, Place
from tests.contract.harness import PRINCIPAL, Harness, Transcript
from tests.support.e2b import Double, Fault, Kind, e2b_section
from tests.support.polling import eventually_async

WORKERS = 5
RECONNECT_S = 30.0
REST_S = 0.1

LINES = 150
_LINE = "a line that fills the stream with its bytes"
PROGRAM = f"""
with open('runs', 'a') as file:
    file.write('x')
for number in range({LINES}):
    print(number, {_LINE!r}, flush=number % 10 == 0)
len(open('runs').read())
"""
"""It says how often it ran so far: who runs it twice is found out."""
SAID = "".join(f"{number} {_LINE}\n" for number in range(LINES))

# A request that may be repeated is made four times, with pauses that sum up to less than this.
_RETRIES_S = 4 * REQUEST_TIMEOUT_S + 3.0
# Seconds that a slow machine may take on top, for all of a life.
_WORK_S = 20.0
# One fault holds up one request, or one connection to the guest, and then perhaps the end.
BOUND_S = max(_RETRIES_S, READY_TIME_S, RECONNECT_S) + 2 * _RETRIES_S + _WORK_S

_REFUSALS = {
    Reason.BACKEND_UNAVAILABLE: Unavailable,
    Reason.IMAGE_NOT_READY: Unavailable,
    Reason.BACKEND_FULL: ResourceExhausted,
}


_AT_A_BYTE = (Kind.STREAM_CUT, Kind.STREAM_STALL)


AS_USUAL = "as usual"


class Lie(AssertionError):
    """Something was said that is not so."""


@dataclass
class Tally:
    """The ends of the lives."""

    injected: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def note(self, case: Case, end: str, took_s: float, fault: Fault) -> None:
        self.injected += fault.struck
        self.ends[end] = self.ends.get(end, 0) + 1
        self.longest_s = max(self.longest_s, took_s)
        if not (fault.cuts if fault.kind in _AT_A_BYTE else fault.struck):
            self.wrong.append(f"{case}: it never came to it; {end}")
        elif case.harmless and end != AS_USUAL:
            self.wrong.append(f"{case}: harmless, and yet: {end}")
        print(f"    {case}: {end}, {took_s:.1f} s", flush=True)  # noqa: T201

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(self.ends.items()))
        return f"{self.injected} faults; {ends}; the longest life took {self.longest_s:.1f} s"


async def lead(cases: Sequence[Case]) -> Tally:
    """Leads a life for each case. Raises only when a worker can't go on."""
    tally = Tally()
    left = iter(cases)
    async with asyncio.TaskGroup() as group:
        for _ in range(min(WORKERS, len(cases))):
            group.create_task(_work(left, tally))
    return tally


async def _work(cases: Iterator[Case], tally: Tally) -> None:
    with tempfile.TemporaryDirectory(prefix="l-") as directory:
        async with Double(max_sandboxes=1) as double:
            worker = Worker(double, Path(directory))
            for case in cases:  # the workers share them
                await worker.lead(case, tally)


class Worker:
    def __init__(self, double: Double, directory: Path) -> None:
        self._double = double
        self._directory = directory

    async def lead(self, case: Case, tally: Tally) -> None:
        section = e2b_section(
            self._double,
            max_sandboxes=1,
            reconnect_s=RECONNECT_S,
            pause_idle_s=REST_S if case.place.rests else None,
        )
        backend = E2BBackend(self._directory, section)
        settings = {"method": case.place.method, "skip": case.place.skip, **case.settings}
        began_s = time.monotonic()
        harness = Harness(backend, connection=ConnectionTimes(answer_s=REQUEST_TIMEOUT_S))
        async with AsyncExitStack() as stack:
            stack.push_async_callback(harness.__aexit__)  # also where its start fails
            if not case.place.at_start:
                await harness.__aenter__()
            fault = self._double.fault(case.kind, case.place.path, **settings)
            try:
                async with asyncio.timeout(BOUND_S):
                    if case.place.at_start:
                        await harness.__aenter__()
                    end = await Life(self._double, backend, harness, case.place, fault).lead()
            except SandboxFailure as failure:
                end = f"not started ({failure})"
            except TimeoutError:
                end = "hung"
                tally.wrong.append(f"{case}: not over after {BOUND_S:g} s")
            except Lie as lie:
                end = "wrong"
                tally.wrong.append(f"{case}: {lie}")
            took_s = time.monotonic() - began_s
            self._double.clear_faults()
            tally.note(case, end, took_s, fault)
            if not end.startswith("not started"):
                tally.wrong += [f"{case}: {left}" for left in await _left(self._double, backend, harness)]


class Life:
    """One session, from its creation to its end."""

    def __init__(self, double: Double, backend: E2BBackend, harness: Harness, place: Place, fault: Fault) -> None:
        self._double = double
        self._backend = backend
        self._harness = harness
        self._place = place
        self._fault = fault

    async def lead(self) -> str:
        try:
            session = await self._harness.session()
        except ExecutorError as refusal:
            return self._refused(refusal)
        end = _checked(session, await self._harness.run(session, PROGRAM), 1)
        if end == AS_USUAL:
            await self._between(session)
            end = await self._second(session)
        await self._harness.manager.delete(PRINCIPAL, session.session_id)
        return end

    async def _second(self, session: Session) -> str:
        try:
            return _checked(session, await self._harness.run(session, PROGRAM), 2)
        except PreconditionFailed as lost:  # by now
            if lost.reason is not Reason.SESSION_LOST or not session.lost_reason:
                raise Lie(f"not to be used, and not lost: {lost}") from lost
            return f"lost ({session.lost_reason})"

    def _refused(self, refusal: ExecutorError) -> str:
        reason = refusal.reason
        if not isinstance(refusal, _REFUSALS.get(reason, ())) or not str(refusal):
            raise Lie(f"refused with {refusal!r}")
        return f"refused ({reason.value})"

    async def _between(self, session: Session) -> None:
        """Goes through the life of a session that no client uses."""
        capabilities = self._backend._capabilities
        assert capabilities is not None
        await capabilities.renewer.renew_all()
        if self._place.breaks:
            self._double.cut_all()
        if self._place.rests:
            await eventually_async(lambda: session.state in ("paused", "lost") or self._stays_up(session))

    def _stays_up(self, session: Session) -> bool:
        """It was to rest, and the cloud would not have it."""
        return self._fault.struck > 0 and session._connection.state is ConnectionState.UP


async def _left(double: Double, backend: E2BBackend, harness: Harness) -> list[str]:
    """Returns leftovers, once the cloud works again and the daemon has swept."""
    await backend.sweep()
    found = [f"a sandbox is left: {one}" for one in double.sandboxes]
    found += [f"the daemon keeps a sandbox: {one}" for one in backend._live]
    found += [f"the daemon keeps session {one.session_id}" for one in harness.manager.list_all()]
    return found


def _checked(session: Session, transcript: Transcript, runs: int) -> str:
    """Raises Lie when the result says something that is not so."""
    result = transcript.ended
    outcome = transcript.outcome
    if outcome == "succeeded":
        if transcript.stdout != SAID:
            raise Lie(f"succeeded, with {len(transcript.stdout)} of {len(SAID)} characters of its output")
        if transcript.output != runs:
            raise Lie(f"succeeded, and ran {transcript.output} times, not {runs}")
        return AS_USUAL
    if outcome != "lost" or not session.lost_reason or result.error is None or not result.error.message:
        raise Lie(f"{outcome}, and the session is {session.state}: {session.lost_reason!r}, {result.error}")
    if not SAID.startswith(transcript.stdout):
        raise Lie("what it had said is not what it had printed")
    return f"lost ({session.lost_reason})"
