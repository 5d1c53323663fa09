"""The journal: the next daemon knows exactly what was written when the last one was killed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import InvalidRequest, NotFound, OutOfRange
from executor_server.core.model import (
    ErrorDetail,
    Event,
    EventKind,
    ExecutionLimits,
    Log,
    Outcome,
    OutputCut,
    OutputMode,
    Queued,
    Result,
    ToolCall,
)
from executor_server.core.network import NetworkUsage
from executor_server.guest.wire.frames import Fields, FrameDecoder, FrameError, Kind, encode_frame, encode_prefix
from executor_server.guest.wire.messages import Cancel, Restrict, ToolResult
from executor_server.guest.wire.schema import Message
from executor_server.policy.requested import RequestedLimits
from executor_server.sessions.journal import segments as segments_module
from executor_server.sessions.journal.execution import Execution, ExecutionRequest, ToolFailure
from executor_server.sessions.journal.journal import Journal, JournalLimits
from executor_server.sessions.journal.records import SegmentError, added_checksum, first_checksum
from executor_server.sessions.journal.segments import RecordKind, Segments
from tests.support.fake_guest import USAGE
from tests.support.full_disk import fill_disk
from tests.support.rounds import rounds

LIMITS = ExecutionLimits(1.5, 2.0, 1000, 1000)
ASKED = RequestedLimits(wall_time_s=1.5)
MODE = OutputMode.TRAILING_EXPRESSION
Files = dict[str, bytes]


class Bench:
    """A journal on a directory, and its owner; the test is the client and the guest."""

    def __init__(
        self, directory: Path, *, journal_bytes: int = 10**6, max_finished: int = 64, has_network: bool = False
    ) -> None:
        self.directory = directory
        self.sent: list[tuple[Message, bytes]] = []
        self.undecided: list[str] = []
        self.ended: list[str] = []
        self.held: set[object] = set()
        self.seq = 0  # the last number that was sent
        self.guest_seq = 0
        self.delivered = 0
        self.segments = Segments(directory)
        self.refusal: str | None = None  # for every tool call
        self.asks = False  # before every tool call
        self.asked: list[str] = []
        self.reported: list[EventKind] = []
        self.journal = Journal(self.segments, JournalLimits(journal_bytes, max_finished), self, has_network=has_network)

    def on_undecided(self, execution_id: str) -> None:
        self.undecided.append(execution_id)

    def refusal_of(self, execution_id: str, call: ToolCall) -> str | None:
        return self.refusal

    def must_ask(self, call: ToolCall) -> bool:
        return self.asks

    def on_held(self, execution_id: str, call: ToolCall) -> None:
        self.asked.append(call.call_id)

    def on_event(self, execution_id: str, event: EventKind) -> None:
        self.reported.append(event)

    def on_end(self, execution_id: str, result: Result) -> None:
        self.ended.append(execution_id)

    def send(self, message: Message, body: bytes) -> None:
        self.seq += 1
        prefix = encode_prefix(message.kind, message.head(), len(body), seq=self.seq, ack=self.guest_seq)
        self.journal.note_sent(message.kind, self.seq, prefix, body)
        self.sent.append((message, body))

    def hold(self, holder: object, held: bool) -> None:
        (self.held.add if held else self.held.discard)(holder)

    def execute(self, name: str, code: str = "1") -> Execution:
        return self.journal.execute(ExecutionRequest(name, code, MODE, ASKED), LIMITS, "policy")

    def say(self, kind: int, head: dict[str, Any], body: bytes = b"", *, ack: int | None = None) -> None:
        self.guest_seq += 1
        self.delivered = self.seq if ack is None else ack
        frame = encode_frame(kind, head, body, seq=self.guest_seq, ack=self.delivered)
        self.journal.take(FrameDecoder().feed(frame)[0])

    def log(self, name: str, text: str, **options: Any) -> None:
        self.say(Kind.LOG, {"id": name, "stream": "stdout"}, text.encode(), **options)

    def call(self, name: str, call_id: str) -> None:
        self.say(Kind.TOOL_CALL, {"id": name, "call": call_id, "name": "f"}, b"args")

    def end(self, name: str, **more: Any) -> None:
        head = {"id": name, "outcome": "succeeded", "variables": "kept", "generation": 1, "final": "", "error": 0}
        self.say(Kind.RESULT, {**head, **USAGE, **more})

    def begin_segment(self) -> None:
        """Begins a segment although the last one is not full."""
        state = self.journal.state
        state.end_segment()
        self.segments.begin_segment(state.snapshot(), without=state.unneeded_segments())
        state.begin_segment(self.segments.segment)

    @property
    def files(self) -> Files:
        return {path.name: path.read_bytes() for path in self.directory.iterdir()}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "journal")
    bench.journal.begin_segments()
    yield bench
    bench.journal.close()


@contextmanager
def replayed(files: Files, directory: Path, **limits: Any) -> Iterator[Bench]:
    """The journal of another daemon, on a copy of these files."""
    directory.mkdir(exist_ok=True)
    for path in directory.iterdir():
        path.unlink()
    for name, data in files.items():
        (directory / name).write_bytes(data)
    bench = Bench(directory, **limits)
    bench.journal.replay()
    yield bench
    bench.journal.close()


def held_events(execution: Execution) -> list[Event]:
    held: list[Event] = []
    execution.report_to(lambda _name, event, _size_bytes: held.append(event))
    return list(held)


async def read(execution: Execution, after: int = 0) -> list[Event]:
    return [event async for event in execution.events(after)]


# -- recovery


async def test_events_come_back_under_their_numbers(bench: Bench, tmp_path: Path) -> None:
    first, second = bench.execute("e1"), bench.execute("e2", "2")
    bench.log("e1", "one")
    bench.call("e1", "c1")
    first.submit_tool_result("c1", b"value")
    bench.end("e1", generation=3)
    bench.log("e2", "two")
    with replayed(bench.files, tmp_path / "next") as after:
        journal = after.journal
        assert list(journal.state.running) == ["e2"]
        assert (journal.state.generation, journal.state.taken_seq) == (3, 4)
        again = journal.state.executions.get("e1")
        assert again is not None
        assert await read(again) == await read(first)
        assert again.fingerprint == first.fingerprint
        running = journal.state.executions.get("e2")
        assert running is not None
        assert held_events(running) == held_events(second) == [Event(1, Queued(1)), Event(2, Log("stdout", "two"))]
        assert journal.known_as(ExecutionRequest("e2", "2", MODE, ASKED)) is running
        with pytest.raises(InvalidRequest):
            journal.known_as(ExecutionRequest("e2", "3", MODE, ASKED))
        after.guest_seq = journal.state.taken_seq
        after.end("e2", generation=3)
        assert running.done
    assert after.ended == ["e2"], "what had ended before was reported before"


async def test_an_answered_call_is_answered_in_the_next_daemon_too(bench: Bench, tmp_path: Path) -> None:
    execution = bench.execute("e")
    bench.call("e", "c1")
    bench.call("e", "c2")
    execution.submit_tool_result("c1", ToolFailure("ValueError", "no"))
    with replayed(bench.files, tmp_path / "next") as after:
        again = after.journal.state.executions.get("e")
        assert again is not None
        with pytest.raises(Exception, match="has been answered"):
            again.submit_tool_result("c1", b"late")
        assert again.waits_for_client
        again.submit_tool_result("c2", b"now")
        assert not again.waits_for_client


def test_what_the_guest_had_not_taken_is_sent_again_in_order(bench: Bench, tmp_path: Path) -> None:
    bench.execute("e1", "one")
    bench.log("e1", "x")  # acknowledges e1
    bench.execute("e2", "two").cancel()
    bench.execute("e3", "three")
    with replayed(bench.files, tmp_path / "next") as after:
        again = after.journal.resume(taken=2)  # e1, e2
        assert [(message.kind, message.head()["id"], body) for message, body in again] == [
            (Kind.CANCEL, "e2", b""),
            (Kind.EXECUTE, "e3", b"three"),
        ]


def test_what_was_sent_again_is_not_taken_for_what_was_sent_at_first(bench: Bench, tmp_path: Path) -> None:
    """The numbers of the second daemon overlap those of the first, which the guest never saw."""
    for number in range(1, 6):
        bench.execute(f"e{number}")
    with replayed(bench.files, tmp_path / "second") as second:
        assert len(second.journal.resume(taken=2)) == 3  # they get the numbers 3 to 5
        second.seq = 5
        second.execute("e6")
        files = second.files
    for taken, missing in ((2, ["e3", "e4", "e5", "e6"]), (4, ["e5", "e6"]), (6, [])):
        with replayed(files, tmp_path / "third") as third:
            assert [message.head()["id"] for message, _ in third.journal.resume(taken)] == missing


async def test_a_result_waits_for_its_verdict_in_the_next_daemon(bench: Bench, tmp_path: Path) -> None:
    bench.execute("e1")
    bench.end("e1", outcome="crashed", oom_suspect=True)
    assert bench.undecided == ["e1"]
    assert bench.journal.state.undecided["e1"].is_suspect
    with replayed(bench.files, tmp_path / "next") as after:
        assert list(after.journal.state.undecided) == ["e1"]
        after.journal.decide("e1", 1)
        after.guest_seq = 1
        after.execute("e2")
        after.end("e2", outcome="crashed", oom_suspect=True)
        after.journal.decide("e2", 1)
        files = after.files
    with replayed(files, tmp_path / "third") as third:
        outcomes = [(await read(third.journal.state.executions[name]))[-1].kind for name in ("e1", "e2")]
        assert [each.outcome for each in outcomes if isinstance(each, Result)] == [
            Outcome.OUT_OF_MEMORY,
            Outcome.CRASHED,
        ]


async def test_in_a_sandbox_with_a_network_every_result_waits_for_what_it_used(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal", has_network=True)
    bench.journal.begin_segments()
    execution = bench.execute("e")
    bench.journal.note_network("e", NetworkUsage(1, 0, 10, 20))
    bench.end("e")
    assert (bench.undecided, execution.done) == (["e"], False)
    assert not bench.journal.state.undecided["e"].is_suspect
    with replayed(bench.files, tmp_path / "next", has_network=True) as after:
        again = after.journal.state.executions.get("e")
        assert again is not None
        assert (list(after.journal.state.undecided), again.network) == (["e"], NetworkUsage(1, 0, 10, 20))
    used = NetworkUsage(2, 1, 30, 40)
    bench.journal.note_network("e", used)
    bench.journal.decide("e", None)
    bench.journal.note_network("e", NetworkUsage(9))  # it has ended
    for events in (await read(execution), await reread(bench, tmp_path, has_network=True)):
        result = events[-1].kind
        assert isinstance(result, Result)
        assert (result.outcome, result.network) == (Outcome.SUCCEEDED, used)
    bench.journal.close()


async def test_a_line_of_the_daemon_stands_in_the_log_also_while_the_result_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal", has_network=True)
    bench.journal.begin_segments()
    execution = bench.execute("e")
    bench.log("e", "one")
    bench.journal.add_notice("e", "two \udc80\n")
    bench.end("e")
    assert "e" in bench.journal.state.undecided
    bench.journal.add_notice("e", "three\n")
    bench.journal.decide("e", None)
    bench.journal.add_notice("e", "too late")
    assert "e" not in bench.journal.state.undecided
    for events in (await read(execution), await reread(bench, tmp_path, has_network=True)):
        assert [event.kind for event in events][:-1] == [
            *(Log("stdout", "one"), Log("stderr", "two ?\n")),
            Log("stderr", "three\n"),
        ]
        assert [event.number for event in events] == [1, 2, 3, 4]
    bench.journal.close()


async def test_what_a_lost_execution_used_of_the_network_stands_in_its_result(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal", has_network=True)
    bench.journal.begin_segments()
    execution = bench.execute("e")
    bench.journal.note_network("e", NetworkUsage(1, 0, 10, 20))
    bench.journal.lose("it caught fire")
    for events in (await read(execution), await reread(bench, tmp_path, has_network=True)):
        result = events[-1].kind
        assert isinstance(result, Result)
        assert (result.outcome, result.network) == (Outcome.LOST, NetworkUsage(1, 0, 10, 20))


@pytest.mark.parametrize("harm", [{"sent_bytes": -1}, {"denied": "1"}, {"connections": None}])
def test_a_use_of_the_network_that_is_none_is_damage(tmp_path: Path, harm: dict[str, Any]) -> None:
    bench = Bench(tmp_path / "journal", has_network=True)
    bench.journal.begin_segments()
    bench.execute("e")
    used = {"connections": 1, "denied": 0, "sent_bytes": 1, "received_bytes": 1, **harm}
    bench.segments.append(encode_frame(RecordKind.NETWORK, {"id": "e", **used}))
    bench.journal.close()
    with pytest.raises(SegmentError, match="damaged"):
        Bench(bench.directory, has_network=True).journal.replay()


async def test_a_lost_session_stays_lost_for_the_same_reason(bench: Bench, tmp_path: Path) -> None:
    execution = bench.execute("e")
    bench.journal.lose("it caught fire")
    assert bench.journal.state.lost == "it caught fire"
    with replayed(bench.files, tmp_path / "next") as after:
        assert after.journal.state.lost == "it caught fire"
        again = after.journal.state.executions.get("e")
        assert again is not None
        assert await read(again) == await read(execution)


def test_other_rules_keep_their_place_among_what_is_sent_again(bench: Bench, tmp_path: Path) -> None:
    """Otherwise executions of the new policy would run under the rules of the old one."""
    bench.execute("before")
    bench.send(Restrict(op=1), b"{}")
    bench.execute("after")
    with replayed(bench.files, tmp_path / "next") as after:
        assert [message.kind for message, _ in after.journal.resume(1)] == [Kind.RESTRICT, Kind.EXECUTE]


def test_what_was_stopped_is_cancelled_by_the_daemon_that_comes_before_it_has_ended(
    bench: Bench, tmp_path: Path
) -> None:
    bench.execute("e")
    bench.refusal = "not recorded"
    bench.call("e", "c1")
    assert bench.sent[-1][0].kind == Kind.CANCEL
    with replayed(bench.files, tmp_path / "next") as after:
        assert after.journal.resume(bench.seq) == [(Cancel(id="e"), b"")]
        assert after.journal.state.taken_seq == bench.guest_seq
        after.end("e", outcome="cancelled")
        (last,) = (event.kind for event in held_events(after.journal.state.executions["e"]))
    assert isinstance(last, Result)
    assert last.error == ErrorDetail("Cancelled", "not recorded")
    assert last.policy_fingerprint == "policy"


def test_a_frame_that_is_refused_is_not_recorded(bench: Bench, tmp_path: Path) -> None:
    bench.execute("e")
    for kind, head in (
        (Kind.LOG, {"id": "other", "stream": "stdout"}),
        (Kind.LOG, {"id": "e", "stream": "stdin"}),
        (Kind.EXECUTE, {"id": "e"}),
        (Kind.RESULT, {"id": "e"}),
    ):
        with pytest.raises(FrameError):
            bench.say(kind, head)
    with replayed(bench.files, tmp_path / "next") as after:
        assert list(after.journal.state.running) == ["e"]
        assert after.journal.state.taken_seq == 0


# -- cancelled executions without readers


async def test_what_a_cancelled_execution_says_without_room_is_cut_and_the_cut_is_announced(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal", journal_bytes=3000)
    bench.journal.begin_segments()
    execution = bench.execute("e")
    while not bench.held:
        bench.log("e", "x" * 500)
    kept = held_events(execution)
    execution.cancel()
    for _ in range(100):
        bench.log("e", "y" * 500)
    bench.say(Kind.TOOL_CALL, {"id": "e", "call": "c", "name": "f"}, b"args")
    bench.end("e", outcome="cancelled")
    assert not bench.held
    *before, cut, end = await read(execution)
    assert before == kept, "what was kept is there still, for a reader who comes back"
    assert isinstance(cut.kind, OutputCut)
    assert cut.kind.omitted_bytes > 50_000
    assert isinstance(end.kind, Result)
    assert end.kind.outcome is Outcome.CANCELLED
    assert sum(map(len, bench.files.values())) < 10_000, "what is discarded takes no room on the disk either"
    with replayed(bench.files, tmp_path / "next", journal_bytes=3000) as after:
        again = after.journal.state.executions.get("e")
        assert again is not None
        assert await read(again) == [*kept, cut, end]
    bench.journal.close()


async def test_killed_in_the_middle_of_a_cut_the_next_daemon_tells_of_it_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "journal", journal_bytes=3000)
    bench.journal.begin_segments()
    execution = bench.execute("e")
    while not bench.held:
        bench.log("e", "x" * 500)
    execution.cancel()
    bench.log("e", "y" * 500)
    bench.begin_segment()
    bench.log("e", "z" * 500)
    with replayed(bench.files, tmp_path / "next", journal_bytes=3000) as after:
        again = after.journal.state.executions.get("e")
        assert again is not None
        assert not after.held
        after.guest_seq = bench.guest_seq
        after.log("e", "more")
        after.end("e", outcome="cancelled")
        assert isinstance((await read(again))[-2].kind, OutputCut)
    bench.journal.close()


async def test_an_output_of_which_pieces_were_cut_is_not_told_as_one(tmp_path: Path) -> None:
    """It may have ended by itself, in the moment in which it was cancelled."""
    bench = Bench(tmp_path / "journal", journal_bytes=3000)
    bench.journal.begin_segments()
    execution = bench.execute("e")
    while not bench.held:
        bench.say(Kind.BLOB_CHUNK, {"id": "e", "blob": "b"}, bytes(500))
    execution.cancel()
    bench.say(Kind.BLOB_CHUNK, {"id": "e", "blob": "b"}, bytes(500))
    bench.end("e", blob="b", size=10_000)
    for events in (await read(execution), await reread(bench, tmp_path)):
        result = events[-1].kind
        assert isinstance(result, Result)
        assert (result.outcome, result.output) == (Outcome.CANCELLED, None)
        assert result.error is not None
        assert "no room" in result.error.message
    bench.journal.close()


async def reread(bench: Bench, directory: Path, **options: Any) -> list[Event]:
    with replayed(bench.files, directory / "next", **options) as after:
        execution = after.journal.state.executions.get("e")
        assert execution is not None
        return await read(execution)


# -- a kill at every moment


class Drama:
    """Random executions with readers, answers, ends and losses; notes what must be known after each step."""

    def __init__(self, bench: Bench, seed: int) -> None:
        self.bench = bench
        self.chance = random.Random(seed)
        self.names = 0
        self.open: list[tuple[str, str]] = []
        self.wrote_one = True  # in the last step, which counts as done or not when its record is torn

    def come_back(self, directory: Path, **limits: Any) -> Bench:
        """The daemon is killed; the next one goes on, with a guest that has taken some of what was sent."""
        before, taken = self.bench, self.chance.randint(self.bench.delivered, self.bench.seq)
        before.journal.close()
        self.bench = Bench(directory, **limits)
        self.bench.journal.replay()
        self.bench.guest_seq = before.guest_seq
        self.bench.delivered, self.bench.seq = taken, taken + len(self.bench.journal.resume(taken))
        return self.bench

    async def step(self) -> None:
        self.wrote_one = True
        running = list(self.bench.journal.state.running)
        free = [name for name in running if name not in self.bench.journal.state.undecided]
        if len(running) < 3 and (not free or self.chance.random() < 0.2):
            self.names += 1
            name = f"e{self.names % 12}"  # some ids are used again, once they are forgotten
            if self.bench.journal.state.executions.get(name) is None:
                self.bench.execute(name, f"{self.names}")
            return
        if not free:
            oom_kills = self.chance.choice([None, 0, self.names])
            is_suspect = self.bench.journal.state.undecided[running[0]].is_suspect
            self.bench.journal.decide(running[0], oom_kills if is_suspect else None)
            return
        name = self.chance.choice(free)
        execution = self.bench.journal.state.running[name]
        what = self.chance.random()
        if what < 0.5:
            self.bench.log(
                name, "x" * self.chance.randrange(300), ack=self.chance.randint(self.bench.delivered, self.bench.seq)
            )
        elif what < 0.6:
            self.bench.call(name, f"c{execution.last_number}")
            self.open.append((name, f"c{execution.last_number - 1}"))
        elif what < 0.75 and self.open:
            name, call_id = self.open.pop()
            if (called := self.bench.journal.state.running.get(name)) is not None and call_id in called.snapshot()[
                "open"
            ]:
                called.submit_tool_result(call_id, self.chance.randbytes(self.chance.randrange(300)))
        elif what < 0.82:
            await self._read_some(execution)
        elif what < 0.85:
            self._stop(name, withheld=what < 0.835)
        elif what < 0.87:
            self.bench.journal.add_notice(name, f"notice {self.names}")
        elif what < 0.9:
            used = execution.network
            self.bench.journal.note_network(name, replace(used, sent_bytes=used.sent_bytes + self.names))
        else:
            self.bench.end(
                name, generation=self.bench.journal.state.generation + self.chance.randrange(2), oom_suspect=what > 0.95
            )

    def _stop(self, name: str, *, withheld: bool) -> None:
        """Stops an execution; the cancellation is the second record."""
        self.wrote_one = False
        if withheld:
            self.bench.refusal = f"refused {self.names}"
            self.bench.call(name, f"w{self.bench.journal.state.taken_seq}")
            self.bench.refusal = None
        else:
            self.bench.journal.stop(name, f"stopped {self.names}")

    async def _read_some(self, execution: Execution) -> None:
        """Reads to the last event; what was read may be dropped."""
        if not held_events(execution):
            return
        async for event in execution.events(execution.first_number - 1):
            if event.number >= execution.last_number - 1:
                return


def known(bench: Bench) -> dict[str, Any]:
    """Returns all that another daemon must know."""
    journal = bench.journal
    snapshots = {name: each.snapshot() for name, each in journal.state.executions.items()}
    return {
        "running": list(journal.state.running),
        "generation": journal.state.generation,
        "oom_kills": journal.state.oom_kills,
        "taken": journal.state.taken_seq,
        "undecided": list(journal.state.undecided),
        "executions": {
            name: (
                *(snapshots[name][fact] for fact in ("fingerprint", "policy", "stopped", "cancelled")),
                each.discarded_bytes > 0,
                each.network,
                *(each.last_number, each.done, sorted(snapshots[name]["open"]), snapshots[name]["answered"]),
                held_events(each),
            )
            for name, each in journal.state.executions.items()
        },
        "undelivered": sorted(journal.state.sent.seqs),
    }


def assert_knows(after: Bench, expected: dict[str, Any]) -> None:
    found = known(after)
    executions, expected_executions = found.pop("executions"), dict(expected["executions"])
    expected = {name: value for name, value in expected.items() if name != "executions"}
    if any(facts[4] for facts in expected_executions.values()):
        # Only the first discarded frame is recorded. The guest sends the others again, unless they were acknowledged,
        # and they are discarded again.
        assert found.pop("taken") <= expected.pop("taken")
        assert set(found.pop("undelivered")) >= set(expected.pop("undelivered"))
    assert found == expected
    assert set(expected_executions) <= set(executions)
    for name, (*facts, events) in expected_executions.items():
        *found_facts, found_events = executions[name]
        assert found_facts == facts
        # Events that were dropped after reading may be there again; no held event is missing, and there is no gap.
        assert found_events[len(found_events) - len(events) :] == events
        numbers = [event.number for event in found_events]
        last = facts[6]
        assert numbers == list(range(numbers[0], last + 1)) if numbers else last == 0 or not events


@pytest.mark.parametrize("seed", range(rounds(6, 2)))
async def test_every_prefix_of_the_segments_is_a_moment_that_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 3000)
    limits: dict[str, Any] = {"journal_bytes": 6000, "max_finished": 4, "has_network": seed % 2 == 1}
    bench = Bench(tmp_path / "journal", **limits)
    bench.journal.begin_segments()
    drama = Drama(bench, seed)
    before, most = known(bench), 0
    for _ in range(150):
        current, head = bench.segments.segment, bench.files["head"]
        written_bytes = len(bench.files[str(current)])
        await drama.step()
        now, files = known(bench), bench.files
        with replayed(files, tmp_path / "next", **limits) as after:
            assert_knows(after, now)
        last = str(bench.segments.segment)
        if drama.wrote_one and bench.segments.segment == current and len(files[last]) > written_bytes:
            cut = drama.chance.randrange(written_bytes, len(files[last]))
            with replayed({**files, "head": head, last: files[last][:cut]}, tmp_path / "next", **limits) as after:
                assert_knows(after, before)
        if drama.chance.random() < 0.1:
            bench = drama.come_back(bench.directory, **limits)
            now = known(bench)
        before = now
        most = max(most, sum(map(len, files.values())))
    assert bench.segments.segment > 5, "the segments were too few to show anything"
    assert not bench.segments.broken
    assert most < 60_000, "segments are not removed"
    bench.journal.close()


async def test_segments_before_a_gap_are_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old execution holds its segment, while a later one that is read frees those in between."""
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 2000)
    bench = Bench(tmp_path / "journal", journal_bytes=3000)
    bench.journal.begin_segments()
    bench.execute("old")
    bench.log("old", "kept")
    bench.end("old")
    flood = bench.execute("flood")
    events = flood.events()
    for _ in range(200):
        bench.log("flood", "x" * 200)
        await anext(events)
    assert "1" in bench.files
    assert len(bench.files) < 6
    with replayed(bench.files, tmp_path / "next", journal_bytes=3000) as after:
        old, again = after.journal.state.executions.get("old"), after.journal.state.executions.get("flood")
        assert old is not None
        assert again is not None
        assert [event.kind for event in await read(old)][:-1] == [Log("stdout", "kept")]
        assert again.last_number == 200
        with pytest.raises(OutOfRange):
            await anext(again.events(0))
        assert "flood" in after.held, "it is full until somebody says how far he has come"
        reader = again.events(200)
        again.publish(Log("stdout", "more"))
        assert (await anext(reader)).number == 201
        assert not after.held
    bench.journal.close()


# -- segments that fail


def test_a_journal_that_cannot_be_written_is_removed_and_the_executions_go_on(bench: Bench, tmp_path: Path) -> None:
    fill_disk(bench.directory)
    execution = bench.execute("e")
    assert bench.segments.broken
    bench.log("e", "x")
    bench.end("e")
    assert execution.done
    assert not bench.directory.exists()
    with pytest.raises(SegmentError, match="could not be written"):
        Bench(bench.directory).journal.replay()


@pytest.mark.parametrize(
    "harm", ["garbage", "no snapshot", "torn in the middle", "an event of an unknown execution", "empty"]
)
async def test_a_damaged_journal_is_read_as_far_as_it_goes_and_says_so(bench: Bench, tmp_path: Path, harm: str) -> None:
    bench.execute("e")
    bench.end("e")
    files = bench.files
    frame = encode_frame(Kind.LOG, {"id": "e", "stream": "stdout"})
    unknown = encode_frame(Kind.LOG, {"id": "x", "stream": "stdout"})
    strange = {
        "garbage": {"2": b"\xff" * 100},
        "no snapshot": {"2": frame + added_checksum(first_checksum("", 2), frame)[1]},
        "torn in the middle": {"1": files["1"][:-1], "2": files["1"]},
        "an event of an unknown execution": {
            "1": files["1"] + unknown + added_checksum(int.from_bytes(files["1"][-4:], "big"), unknown)[1]
        },
        "empty": {"1": b""},
    }
    with pytest.raises(SegmentError), replayed({**files, **strange[harm]}, tmp_path / "next"):
        pass
    after = Bench(tmp_path / "next")
    with pytest.raises(SegmentError):
        after.journal.replay()
    if harm in ("garbage", "no snapshot", "an event of an unknown execution"):
        again = after.journal.state.executions.get("e")
        assert again is not None
        assert again.done
    size = {path.name: path.stat().st_size for path in after.directory.iterdir()}
    after.journal.lose("its journal is damaged")
    assert {path.name: path.stat().st_size for path in after.directory.iterdir()} == size


async def test_a_snapshot_that_was_torn_is_as_if_it_had_not_begun(bench: Bench, tmp_path: Path) -> None:
    execution = bench.execute("e")
    bench.log("e", "x")
    head = bench.files["head"]
    bench.begin_segment()
    files = bench.files
    for cut in (0, 3, len(files["2"]) - 1):
        with replayed({**files, "head": head, "2": files["2"][:cut]}, tmp_path / "next") as after:
            again = after.journal.state.executions.get("e")
            assert again is not None
            assert held_events(again) == held_events(execution)
            after.guest_seq = 1
            after.log("e", "y")
            assert after.files.keys() == {"1", "head"}


def test_an_end_by_closing_says_so(bench: Bench) -> None:
    bench.execute("e")
    bench.journal.end_all(Outcome.CANCELLED, ErrorDetail("SessionEnded", "over"))
    assert bench.ended == ["e"]
    assert not bench.journal.state.running


def test_a_restored_execution_is_checked_like_a_frame(bench: Bench) -> None:
    execution = bench.execute("e")
    with pytest.raises(FrameError):
        execution.restore(Fields({**execution.snapshot(), "last": 3, "first": 7}))


async def test_an_execution_that_was_forgotten_meanwhile_holds_back_no_guest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its events lay in a segment that another one needs, its end in one that was removed."""
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 9000)
    limits: dict[str, Any] = {"journal_bytes": 3000, "max_finished": 1}
    bench = Bench(tmp_path / "journal", **limits)
    bench.journal.begin_segments()
    flood = bench.execute("flood")
    bench.execute("next")  # waits, so its first event is in the first segment
    events = flood.events()
    for _ in range(60):
        bench.log("flood", "x" * 300)
        await anext(events)
    bench.end("flood")
    for number in range(5):  # they wait and are cancelled
        bench.execute(f"other{number}", "x" * 9000)
        bench.end(f"other{number}")
    assert bench.journal.state.executions.get("flood") is None
    assert {"1", "2", "3", "4"} & bench.files.keys() == {"1"}
    with replayed(bench.files, tmp_path / "after", **limits) as after:
        assert list(after.journal.state.running) == ["next"]
        assert not after.held
    bench.journal.close()


async def test_executions_that_shrank_cost_no_other_its_place(tmp_path: Path) -> None:
    """Their bytes at their end were still counted after they were dropped, and at last only one was kept."""
    bench = Bench(tmp_path / "journal", journal_bytes=100_000, max_finished=3)
    bench.journal.begin_segments()
    for number in range(20):
        execution = bench.execute(f"e{number}")
        bench.log(f"e{number}", "x" * 30_000)
        bench.end(f"e{number}")
        execution.drop_read()
        assert len(bench.journal.state.executions) == min(number + 1, 3)
    bench.journal.close()


# -- calls that wait for an approval


def held_calls(bench: Bench) -> list[tuple[str, ToolCall]]:
    return [(execution_id, held.call) for (execution_id, _), held in bench.journal.state.held.items()]


async def test_a_held_call_is_no_event_until_it_is_released(bench: Bench, tmp_path: Path) -> None:
    execution = bench.execute("e")
    bench.asks = True
    bench.log("e", "one")
    for call_id in ("c1", "c2", "c3"):
        bench.call("e", call_id)
    assert bench.asked == ["c1", "c2", "c3"]
    with pytest.raises(FrameError, match="made before"):
        bench.call("e", "c1")
    assert held_events(execution) == [Event(1, Log("stdout", "one"))]
    assert not execution.waits_for_client
    with pytest.raises(NotFound):
        execution.check_answer("c1")

    bench.journal.release("e", "c1")
    bench.journal.deny("e", "c2", ToolFailure("PermissionError", "no"))
    (*_, (answer, body)) = bench.sent
    assert isinstance(answer, ToolResult) and (answer.call, answer.ok, body) == ("c2", False, b"no")
    released = [Event(1, Log("stdout", "one")), Event(2, ToolCall("c1", "f", b"args"))]
    assert held_events(execution) == released

    with replayed(bench.files, tmp_path / "next") as after:
        again = after.journal.state.executions.get("e")
        assert again is not None and held_events(again) == released
        assert held_calls(after) == [("e", ToolCall("c3", "f", b"args"))], "the next daemon asks for it again"
        after.guest_seq = after.journal.state.taken_seq
        after.journal.release("e", "c3")
        assert held_events(again)[-1] == Event(3, ToolCall("c3", "f", b"args"))
    bench.end("e")
    assert held_calls(bench) == []


async def test_a_held_call_outlives_its_segment(bench: Bench, tmp_path: Path) -> None:
    execution = bench.execute("e")
    bench.asks = True
    bench.call("e", "c")
    for _ in range(12):  # three segments
        bench.log("e", "x" * 1_000_000)
        execution.drop_read()
    with replayed(bench.files, tmp_path / "next") as after:
        assert held_calls(after) == [("e", ToolCall("c", "f", b"args"))]
        after.guest_seq = after.journal.state.taken_seq
        after.journal.release("e", "c")
        files = after.files
    with replayed(files, tmp_path / "last") as last:
        again = last.journal.state.executions.get("e")
        assert again is not None and held_events(again)[-1].kind == ToolCall("c", "f", b"args")
        assert held_calls(last) == []
