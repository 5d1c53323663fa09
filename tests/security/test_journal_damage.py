"""A journal that was damaged while no daemon ran is read as it was, or is said to be damaged; nothing wrong is served.

What counts as right: the same executions with the same events, or an error, and then whatever was read before it is a
part of what there was. Every kind of damage is tried at every place of a small journal.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from executor_server.guest.wire.frames import Kind
from executor_server.sessions.journal import segments as segments_module
from executor_server.sessions.journal.execution import ToolFailure
from executor_server.sessions.journal.records import HEAD, SegmentError
from executor_server.sessions.journal.segments import RecordKind
from tests.support.rounds import rounds
from tests.unit.sessions.journal.test_journal import Bench, Files, held_events, known, replayed

# Bytes from one place that is damaged to the next; prime, and so no record's size divides by it.
STRIDE = rounds(1, 29)
PATTERNS = (0x01, 0x80, 0xFF, 0x55)
"""Bits that are flipped in a byte."""


def small(directory: Path) -> Bench:
    """A journal with a record of every kind, in two segments, of which the first is needed."""
    bench = Bench(directory)
    bench.journal.begin_segments()
    first = bench.execute("e1")
    bench.log("e1", "The amount is 1,024 EUR.\n")
    bench.call("e1", "c1")
    first.submit_tool_result("c1", ToolFailure("E", "no"))
    bench.end("e1")
    bench.begin_segment()
    bench.execute("e2")
    bench.end("e2", outcome="crashed", oom_suspect=True)
    bench.journal.decide("e2", 1)
    bench.execute("e3")
    bench.log("e3", "2,048")
    bench.journal.stop("e3", "the policy has changed")
    bench.segments.close()
    return bench


class DamageCheck:
    """Knows what there was; says of damaged files how they were read."""

    def __init__(self, bench: Bench, directory: Path) -> None:
        self.bench = bench
        self._directory = directory
        self._expected = known(bench)
        self.same = self.reported = 0

    def check(self, files: Files, what: str) -> None:
        """Fails when something is served that was not so."""
        try:
            with replayed(files, self._directory) as after:
                found = known(after)
            assert found == self._expected, f"{what}: wrong, and not told"
            self.same += 1
        except SegmentError:
            self.reported += 1
            self._check_part(what)

    def _check_part(self, what: str) -> None:
        """Asserts that what a daemon still shows of a damaged journal is the beginning of what there was."""
        after = Bench(self._directory)
        with pytest.raises(SegmentError):
            after.journal.replay()
        for name, execution in after.journal.state.executions.items():
            was = self.bench.journal.state.executions[name] if name in self._executions else None
            assert was is not None, f"{what}: {name} was never there"
            events = held_events(execution)
            assert events == held_events(was)[: len(events)], f"{what}: {name} has other events"
            assert execution.fingerprint == was.fingerprint

    @property
    def _executions(self) -> dict[str, Any]:
        return self.bench.journal.state.executions


@pytest.fixture
def check(tmp_path: Path) -> DamageCheck:
    return DamageCheck(small(tmp_path / "journal"), tmp_path / "damaged")


def test_each_byte_changed_in_each_way_is_told_or_changes_nothing(check: DamageCheck) -> None:
    files = check.bench.files
    for name, data in files.items():
        for position in range(0, len(data), STRIDE):
            for pattern in PATTERNS:
                harmed = bytearray(data)
                harmed[position] ^= pattern
                check.check({**files, name: bytes(harmed)}, f"byte {position} of {name} ^ {pattern:#x}")
    assert check.same == 0, "every byte counts"


def test_each_block_zeroed_or_overwritten_is_told(check: DamageCheck) -> None:
    files = check.bench.files
    chance = random.Random(1)
    for name, data in files.items():
        for size in (2, 4, 16, 64, 512):
            for start in range(0, len(data), STRIDE * max(1, size // 2)):
                rest = data[start + size :]
                place = min(size, len(data) - start)
                other = bytes(data[(start + len(data) // 2 + index) % len(data)] for index in range(place))
                for block in (bytes(place), chance.randbytes(place), other):
                    harmed = data[:start] + block + rest
                    if harmed != data:
                        check.check({**files, name: harmed}, f"{place} bytes at {start} of {name}")
    assert check.same == 0


def test_each_file_cut_at_each_length_is_told(check: DamageCheck) -> None:
    """Also where a record ends: it looks like a journal whose daemon was killed earlier, and the head knows better."""
    files = check.bench.files
    for name, data in files.items():
        ends = set(itertools.accumulate(map(len, records(data)))) if name in ("1", "2") else set()
        for length in sorted((ends | set(range(0, len(data), STRIDE))) - {len(data)}):
            check.check({**files, name: data[:length]}, f"{name} cut at {length}")
    assert check.same == 0


def test_bytes_after_the_end_are_told_or_cut_off(check: DamageCheck) -> None:
    files = check.bench.files
    for name, data in files.items():
        for more in (b"\0", bytes(512), b"\xff" * 40, data[-60:]):
            check.check({**files, name: data + more}, f"{len(more)} bytes after {name}")


def test_a_torn_record_at_the_end_is_no_damage(check: DamageCheck) -> None:
    """As a daemon leaves it that was killed while it wrote: what it was about has not happened."""
    files, record = check.bench.files, records(check.bench.files["1"])[1]
    for length in range(1, len(record)):
        check.check({**files, "2": files["2"] + record[:length]}, f"a record torn at {length}")
    assert check.reported == 0


def records(segment: bytes) -> list[bytes]:
    found = []
    while segment:
        size = 4 + int.from_bytes(segment[:4], "big") + 4
        found.append(segment[:size])
        segment = segment[size:]
    return found


def test_records_swapped_repeated_and_left_out_are_told(check: DamageCheck) -> None:
    files = check.bench.files
    for name in ("1", "2"):
        whole = records(files[name])
        for first in range(len(whole)):
            check.check({**files, name: b"".join(whole[:first] + whole[first + 1 :])}, f"{name} without {first}")
            check.check({**files, name: b"".join(whole[: first + 1] + whole[first:])}, f"{name}, {first} twice")
            for second in range(first):
                swapped = whole[:]
                swapped[first], swapped[second] = swapped[second], swapped[first]
                check.check({**files, name: b"".join(swapped)}, f"{name}: {first} and {second} swapped")
    assert check.same == 0


def test_segments_swapped_removed_and_repeated_are_told(check: DamageCheck) -> None:
    files = check.bench.files
    check.check({**files, "1": files["2"], "2": files["1"]}, "swapped")
    check.check({**files, "3": files["2"]}, "repeated")
    check.check({**files, "4": files["2"]}, "one too many")
    for name in files:
        check.check({each: data for each, data in files.items() if each != name}, f"without {name}")
    assert check.same == 0


def test_a_segment_in_the_middle_that_is_gone_is_told(
    tmp_path: Path, check: DamageCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that no reader needs are removed, so a gap alone says nothing."""
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 400)
    bench = Bench(tmp_path / "long")
    bench.journal.begin_segments()
    bench.execute("e")
    for number in range(30):
        bench.log("e", f"line {number}")
    bench.segments.close()
    assert len(bench.files) > 5
    check = DamageCheck(bench, tmp_path / "damaged")
    check.check(bench.files, "as it was")
    assert check.same == 1
    for name in bench.files:
        check.check({each: data for each, data in bench.files.items() if each != name}, f"without {name}")
    assert check.same == 1


@pytest.mark.parametrize("which", ["1", "2", HEAD, "all"])
def test_what_is_another_session_s_is_told(tmp_path: Path, which: str) -> None:
    """Sessions whose journals are alike to the byte but for whose they are."""
    journals = {}
    for session_id in ("mine", "theirs"):
        directory = tmp_path / session_id
        segments = segments_module.Segments(directory, session_id)
        segments.create()
        segments.begin_segment(b"{}")
        segments.begin_segment(b"{}")
        segments.close()
        journals[session_id] = directory
    for path in journals["theirs"].iterdir():
        if which in (path.name, "all"):
            (journals["mine"] / path.name).write_bytes(path.read_bytes())
    segments = segments_module.Segments(journals["mine"], "mine")
    with pytest.raises(SegmentError, match="damaged"):
        list(segments.read())


def test_a_journal_of_an_earlier_daemon_is_not_misread(tmp_path: Path, check: DamageCheck) -> None:
    """It was written without checksums and without a head."""
    files = check.bench.files
    bare = {name: b"".join(each[:-4] for each in records(files[name])) for name in ("1", "2")}
    with pytest.raises(SegmentError, match="another version"), replayed(bare, tmp_path / "old"):
        pass


def test_killed_between_a_record_and_the_head_all_is_there(check: DamageCheck, tmp_path: Path) -> None:
    """The head is one record behind, or names the segment before the one that has just been begun."""
    bench = Bench(tmp_path / "killed")
    bench.journal.begin_segments()
    bench.execute("e")
    head = bench.files[HEAD]
    bench.log("e", "text")
    with replayed({**bench.files, HEAD: head}, tmp_path / "next") as after:
        assert known(after) == known(bench)
    head = bench.files[HEAD]
    bench.begin_segment()
    with replayed({**bench.files, HEAD: head}, tmp_path / "next") as after:
        assert known(after) == known(bench)
        after.guest_seq = 1
        after.log("e", "more")
        files, now = after.files, known(after)
    with replayed(files, tmp_path / "last") as after:
        assert known(after) == now


def test_every_kind_of_record_is_in_the_small_journal(check: DamageCheck) -> None:
    kinds = {each[4] for name in ("1", "2") for each in records(check.bench.files[name])}
    assert {Kind.EXECUTE, Kind.LOG, Kind.TOOL_CALL, Kind.TOOL_RESULT, Kind.RESULT, Kind.CANCEL} <= kinds
    assert {RecordKind.SNAPSHOT, RecordKind.VERDICT, RecordKind.STOPPED} <= kinds
