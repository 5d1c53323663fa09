"""Verifies that an audit log is whole: nothing in it was changed, removed, added or moved.

One pass over the files in order, in constant memory. After a problem it continues with the next record, so that one
change is one problem, and not one for each later record. The content of the log is never trusted.

Three things are notes and not problems: a log that begins later because old files were removed, when it records that;
half a record at its very end, which a killed daemon leaves; and records that could not be written, when the log records
their number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from executor_server.policy.audit.chain import GENESIS, AuditKind, Link, Position, read_fields, read_link
from executor_server.policy.audit.directory import MAX_LINE_BYTES, file_numbers, file_path, read_anchor, read_lines

MAX_FINDINGS = 100
"""Problems that are listed, and notes; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """A problem or a note: file and line, and the number of the record that is or should be there."""

    file: str
    line: int
    seq: int
    text: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}record {self.seq} {self.text}"


@dataclass
class Verdict:
    """The result of a verification."""

    files: int = 0
    records: int = 0
    last: Position = GENESIS
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    more: int = 0  # problems and notes that are not listed
    whole: bool = True


def verify(directory: Path, expected: Position | None = None) -> Verdict:
    """Reads the whole log. `expected` is a record that is known from elsewhere to belong to it. Raises OSError."""
    # Read before the records: a daemon that writes meanwhile can only make the log longer than the anchor says.
    anchor = read_anchor(directory)
    verifier = _Verifier(anchor, expected)
    numbers = file_numbers(directory)
    for number in numbers:
        path = file_path(directory, number)
        try:
            verifier.read(path, is_last=number == numbers[-1])
        except FileNotFoundError:
            # A running daemon removes old files; a later record reports that.
            if verifier.verdict.records:
                verifier.problem(verifier.next_seq, "should be here: the file was removed while it was read")
    verifier.end()
    return verifier.verdict


class _Verifier:
    def __init__(self, anchor: Position | None, expected: Position | None) -> None:
        self.verdict = Verdict()
        self._anchor = anchor
        self._expected = expected
        self._file = ""
        self._line = 0
        # The previous record: its number, and the hashes that the next record may name. A changed record has two, the
        # one that it states and its actual one. None: it could not be read.
        self._seq: int | None = None
        self._hashes: tuple[str, ...] | None = None
        # The beginning of a log whose first record is missing: file, line, and the position before it.
        self._begin: tuple[str, int, Position] | None = None

    @property
    def next_seq(self) -> int:
        return (self._seq or 0) + 1

    def problem(self, seq: int, text: str) -> None:
        self.verdict.whole = False
        self._find(self.verdict.problems, seq, text)

    def _find(self, findings: list[Finding], seq: int, text: str) -> None:
        if len(findings) < MAX_FINDINGS:
            findings.append(Finding(self._file, self._line, seq, text))
        else:
            self.verdict.more += 1

    # -- records ---------------------------------------------------------------------------------------------------

    def read(self, path: Path, *, is_last: bool) -> None:
        self._file, self._line = path.name, 0
        self.verdict.files += 1
        pending = False  # the next piece belongs to the same line, which is longer than any record
        for piece in read_lines(path):
            ends = piece.endswith(b"\n")
            if not pending:
                self._line += 1
                if ends:
                    self._read_record(piece)
                elif is_last and len(piece) < MAX_LINE_BYTES:
                    size = f"{len(piece)} bytes"
                    text = f"is incomplete ({size}), as a killed daemon leaves it; the next daemon cuts it off"
                    self._find(self.verdict.notes, self.next_seq, text)
                else:
                    self._damaged()
            pending = not ends

    def _damaged(self) -> None:
        self.problem(self.next_seq, "should be here, but this line is not a record")
        self._hashes = None

    def _read_record(self, line: bytes) -> None:
        link = read_link(line)
        if link is None:
            self._damaged()
            return
        self.verdict.records += 1
        self.verdict.last = link.position
        if link.actual_hash != link.stated_hash:
            # The change may be in its own number.
            self._seq = self.next_seq if self._seq is not None or link.prev == GENESIS.hash else link.seq
            self.problem(self._seq, "was changed: its hash does not match its content")
            self._hashes = (link.stated_hash, link.actual_hash)
            return
        self._check_order(link)
        self._seq, self._hashes = link.seq, (link.actual_hash,)
        self._check_known(link)
        self._check_kind(link, line)

    def _check_order(self, link: Link) -> None:
        if self._seq is None:
            if Position(link.seq - 1, link.prev) != GENESIS:
                self._begin = (self._file, self._line, Position(link.seq - 1, link.prev))
        elif self._hashes is None:
            if link.seq <= self._seq:
                self.problem(link.seq, f"does not belong here, after record {self._seq}")
        elif link.seq > self.next_seq:
            self.problem(link.seq, f"follows record {self._seq}: {_count(link.seq - self.next_seq)} missing before it")
        elif link.seq < self.next_seq:
            self.problem(link.seq, f"does not belong here, after record {self._seq}: added, repeated or moved")
        elif link.prev not in self._hashes:
            self.problem(link.seq, f"does not follow record {self._seq}: one of the two was replaced")

    def _check_known(self, link: Link) -> None:
        for known, who in ((self._anchor, "the anchor"), (self._expected, "the expected record")):
            if known is not None and link.seq == known.seq and link.stated_hash != known.hash:
                self.problem(link.seq, f"does not match {who}: it was replaced")

    def _check_kind(self, link: Link, line: bytes) -> None:
        if link.kind not in (AuditKind.FILE_REMOVED, AuditKind.AUDIT_GAP, AuditKind.AUDIT_REPAIRED):
            return
        fields = read_fields(line) or {}
        if link.kind == AuditKind.FILE_REMOVED:
            if self._begin is not None and fields.get("last_hash") == self._begin[2].hash:
                self._begin = None
        elif link.kind == AuditKind.AUDIT_GAP:
            text = f"reports that the log could not be written: {_count(fields.get('records', 0))} missing before it"
            self._find(self.verdict.notes, link.seq, text)
        elif fields.get("what") == "torn_record":
            self._find(self.verdict.notes, link.seq, "reports that half a record was cut off when the daemon started")
        else:
            self.problem(link.seq, f"reports what the daemon found when it started: {_repair_text(fields)}")

    # -- the end ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        if self._begin is not None:
            self._file, self._line, before = self._begin
            self.problem(
                before.seq + 1,
                f"is the first, and the log does not record that earlier ones were removed: "
                f"{_count(before.seq)} missing",
            )
        self._file, self._line = "", 0
        last_seq = self._seq or 0
        if self._anchor is None:
            self.problem(last_seq, "is the last, and there is no anchor: a missing end would go unnoticed")
        elif self._anchor.seq > last_seq:
            missing = _count(self._anchor.seq - last_seq)
            self.problem(
                last_seq + 1, f"should come at the end, up to {self._anchor.seq} by the anchor: {missing} missing"
            )
        if self._expected is not None and self._expected.seq > last_seq:
            self.problem(self._expected.seq, "is expected, but the log ends before it")
        elif self._expected is not None and self._expected.seq <= last_seq - self.verdict.records:
            self.problem(self._expected.seq, "is expected, but was removed with old files")


def _count(number: object) -> str:
    return "1 record is" if number == 1 else f"{number} records are"


def _repair_text(fields: dict[str, object]) -> str:
    match fields.get("what"):
        case "records_missing":
            return f"records {fields.get('first')} to {fields.get('last')} were missing at the end"
        case "record_changed":
            return f"record {fields.get('record')} was not the one that the anchor named"
        case "damaged_record":
            return f"the end of {fields.get('file')} was damaged"
        case "anchor_missing":
            return "the anchor was missing, and perhaps records at the end"
    return "an entry unknown to this version"
