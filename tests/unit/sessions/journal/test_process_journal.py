"""The journal of processes: what a later daemon reads is what happened, and damage is reported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from executor_server.core import (
    InvalidRequest,
    ProcessEvent,
    ProcessEventKind,
    ProcessOutcome,
    ProcessOutput,
    ProcessOutputCut,
    ProcessRequest,
    Reason,
    ResourceExhausted,
)
from executor_server.guest.wire import process_messages as wire
from executor_server.guest.wire.frames import Frame, FrameDecoder, FrameError, encode_frame
from executor_server.guest.wire.schema import Message
from executor_server.sessions.journal.process_journal import (
    MAX_FINISHED_PROCESSES,
    MAX_UNREAD_PROCESSES,
    ProcessJournal,
)
from executor_server.sessions.journal.process_log import UNREAD_TIME_S, ProcessLog
from executor_server.sessions.journal.records import SegmentError
from executor_server.sessions.journal.segments import Segments
from tests.support.clock import Clock

PIECE = 256 * 1024


class Daemon:
    """A journal on a directory, and what it asked of its session; another one reads what this one wrote."""

    def __init__(self, directory: Path) -> None:
        self.clock = Clock()
        self.granted: dict[str, int] = {}
        self.forgotten: list[str] = []
        self.events: list[tuple[str, ProcessEventKind]] = []
        self._seq = 0
        self.journal = ProcessJournal(Segments(directory, "s"), self, now_s=self.clock)

    def grant(self, process_id: str, granted_bytes: int) -> None:
        self.granted[process_id] = granted_bytes

    def forget(self, process_id: str) -> None:
        self.forgotten.append(process_id)

    def on_process_event(self, log: ProcessLog, event: ProcessEventKind) -> None:
        self.events.append((log.process_id, event))

    def take(self, message: Message, body: bytes = b"", seq: int | None = None) -> None:
        self._seq = self._seq + 1 if seq is None else seq
        self.journal.take(frame(message, body, self._seq))

    def start(self, process_id: str) -> ProcessLog:
        log = self.journal.begin(ProcessRequest(process_id, ("sh", "-c", process_id), env={"A": "secret-value"}))
        self.take(wire.ProcessStarted(id=process_id, pid=9))
        return log

    def print(self, process_id: str, data: bytes) -> None:
        self.take(wire.ProcessOutput(id=process_id, stream="stdout"), data)

    def end(self, process_id: str, exit_code: int = 0) -> None:
        self.take(ended(process_id, exit_code))


def ended(process_id: str, exit_code: int = 0) -> wire.ProcessEnded:
    return wire.ProcessEnded(
        id=process_id,
        outcome="exited",
        exit_code=exit_code,
        signal=0,
        wall_time_s=1.0,
        cpu_time_s=0.5,
        peak_memory_bytes=4096,
        output_bytes=3,
    )


def frame(message: Message, body: bytes, seq: int) -> Frame:
    (read,) = FrameDecoder(frozenset({message.kind})).feed(encode_frame(message.kind, message.head(), body, seq=seq))
    return read


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "s+processes"


@pytest.fixture
def daemon(directory: Path) -> Iterator[Daemon]:
    daemon = Daemon(directory)
    yield daemon
    daemon.journal.close()


def next_daemon(directory: Path) -> Daemon:
    following = Daemon(directory)
    following.journal.replay()
    return following


async def read(log: ProcessLog, after: int = 0) -> list[ProcessEvent]:
    return [event async for event in log.events_with_gap(after)]


async def said(log: ProcessLog, after: int = 0) -> bytes:
    kinds = [event.kind for event in await read(log, after)]
    return b"".join(kind.data for kind in kinds if isinstance(kind, ProcessOutput))


def test_a_session_without_processes_has_no_directory(daemon: Daemon, directory: Path) -> None:
    assert not directory.exists()
    daemon.start("p")
    assert directory.exists()


async def test_the_next_daemon_has_the_same_events_under_the_same_numbers(daemon: Daemon, directory: Path) -> None:
    log = daemon.start("p")
    daemon.print("p", b"one\n")
    daemon.print("p", b"two\n")
    daemon.end("p", 3)
    daemon.start("q")
    before = await read(log)
    following = next_daemon(directory)
    again = following.journal.processes["p"]
    assert await read(again) == before
    assert again.description == log.description
    assert following.journal.taken_seq == daemon.journal.taken_seq == 5
    assert [each.process_id for each in following.journal.running] == ["q"]
    assert following.events == [], "what happened before is not reported again"
    assert following.granted == {}, "nothing is granted while records are read"
    following.journal.close()


def test_values_of_variables_are_not_in_the_files(daemon: Daemon, directory: Path) -> None:
    daemon.start("p")
    assert all(b"secret-value" not in file.read_bytes() for file in directory.iterdir())


async def test_what_follows_a_restart_follows_its_numbers(daemon: Daemon, directory: Path) -> None:
    daemon.start("p")
    daemon.print("p", b"one")
    following = next_daemon(directory)
    following.take(wire.ProcessOutput(id="p", stream="stdout"), b"two", seq=3)
    following.take(ended("p"), seq=4)
    third = next_daemon(directory)
    log = third.journal.processes["p"]
    assert (await said(log), [event.number for event in await read(log)]) == (b"onetwo", [1, 2, 3, 4])
    following.journal.close()
    third.journal.close()


def test_an_id_names_one_process(daemon: Daemon, directory: Path) -> None:
    request = ProcessRequest("p", ("sh", "-c", "p"), env={"A": "secret-value"})
    log = daemon.start("p")
    assert daemon.journal.known_as(request) is log
    with pytest.raises(InvalidRequest) as refused:
        daemon.journal.known_as(ProcessRequest("p", ("other",)))
    assert refused.value.reason is Reason.PROCESS_ID_REUSED
    following = next_daemon(directory)
    assert following.journal.known_as(request) is following.journal.processes["p"]
    following.journal.close()


def test_a_process_that_could_not_start_is_unknown_to_the_next_daemon(daemon: Daemon, directory: Path) -> None:
    log = daemon.journal.begin(ProcessRequest("p", ("none",)))
    daemon.journal.refuse(log, ResourceExhausted(Reason.TOO_MANY_PROCESSES, "no", retry_after_s=1.0))
    assert (daemon.journal.processes, log.done) == ({}, True)
    following = next_daemon(directory)
    assert following.journal.processes == {}
    following.journal.close()


def test_a_process_that_was_never_started_is_dropped_unless_it_is_being_started(
    daemon: Daemon, directory: Path
) -> None:
    """The daemon was killed between its record and its start: nothing would ever end it."""
    for name in ("p", "q"):
        daemon.journal.begin(ProcessRequest(name, ("true",)))
    daemon.start("r")
    following = next_daemon(directory)
    following.journal.drop_unstarted(ResourceExhausted(Reason.TOO_MANY_PROCESSES, "no", retry_after_s=1.0), {"q"})
    assert list(following.journal.processes) == ["q", "r"]
    following.journal.close()


async def test_the_oldest_finished_processes_are_forgotten_once_their_end_was_read(
    daemon: Daemon, directory: Path
) -> None:
    """Without a reader they stay: a client that lost its connection may be on its way back."""
    names = [f"p{number}" for number in range(MAX_FINISHED_PROCESSES + 3)]
    for name in ("unread", *names):
        daemon.start(name)
        daemon.end(name)
    assert list(daemon.journal.processes) == ["unread", *names]
    for name in names:
        await read(daemon.journal.processes[name])
    daemon.start("last")
    daemon.end("last")
    kept = ["unread", *names[4:], "last"]
    assert list(daemon.journal.processes) == kept
    for number in range(MAX_UNREAD_PROCESSES + 1):
        daemon.start(f"q{number}")
        daemon.end(f"q{number}")
    assert len(daemon.journal.processes) == MAX_UNREAD_PROCESSES, "the session's bound holds for the unread, too"
    following = next_daemon(directory)
    for journal in (daemon.journal, following.journal):
        assert "unread" not in journal.processes
        assert journal.was_forgotten("unread") and not journal.was_forgotten("unknown")
    following.journal.close()


def test_a_frame_about_a_forgotten_process_is_dropped_and_one_that_no_guest_sends_is_refused(daemon: Daemon) -> None:
    daemon.take(wire.ProcessOutput(id="unknown", stream="stdout"), b"x")
    assert daemon.journal.taken_seq == 1
    daemon.start("p")
    daemon.end("p")
    with pytest.raises(FrameError):
        daemon.print("p", b"after the end")


async def test_output_of_many_segments_that_no_client_read_is_counted_after_a_restart(
    daemon: Daemon, directory: Path
) -> None:
    """The gap counts events that were dropped before the restart, too."""
    daemon.start("p")
    daemon.clock.now_s += UNREAD_TIME_S
    daemon.journal.trim()
    pieces = 120
    for _ in range(pieces):
        daemon.print("p", bytes(PIECE))
    assert sum(file.stat().st_size for file in directory.iterdir()) < 20 * 2**20, "old segments are removed"
    following = next_daemon(directory)
    log = following.journal.processes["p"]
    following.take(ended("p"), seq=pieces + 2)
    events = await read(log)
    assert isinstance(events[0].kind, ProcessOutputCut)
    kept = sum(len(event.kind.data) for event in events if isinstance(event.kind, ProcessOutput))
    assert events[0].kind.omitted_bytes + kept == pieces * PIECE
    following.journal.close()


def test_a_lost_session_ends_what_runs_with_the_reason(daemon: Daemon) -> None:
    log = daemon.start("p")
    daemon.journal.lose("its sandbox is gone")
    assert log.result is not None
    assert (log.result.outcome, log.result.lost_reason) == (ProcessOutcome.LOST, "its sandbox is gone")
    assert log.result.exit_code is None


@pytest.mark.parametrize("harm", ["changed", "cut", "no head"])
def test_damage_is_reported_and_what_lies_before_it_is_served(daemon: Daemon, directory: Path, harm: str) -> None:
    daemon.start("p")
    daemon.print("p", b"one")
    whole = (directory / "1").stat().st_size
    daemon.print("p", b"two")
    data = bytearray((directory / "1").read_bytes())
    if harm == "changed":
        data[whole + 30] ^= 1
    elif harm == "cut":
        del data[whole + 5 :]
    else:
        (directory / "head").unlink()
    (directory / "1").write_bytes(data)
    following = Daemon(directory)
    with pytest.raises(SegmentError):
        following.journal.replay()
    known = following.journal.processes
    assert [log.last_number for log in known.values()] == ([] if harm == "no head" else [2])
    following.journal.close()
