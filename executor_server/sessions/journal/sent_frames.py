"""The frames of ours that the guest may not have, as the records of a journal make them.

Each has an ordinal among all frames of ours in the journal. A restarted daemon gives new numbers to those that the
guest had not taken, so only the ordinal identifies a frame for good.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

from executor_server.guest.wire.frames import Fields, FrameError
from executor_server.guest.wire.schema import Message

Outgoing = tuple[Message, bytes]
"""A message of ours, with its body."""


@dataclass(frozen=True)
class _Undelivered:
    """A frame of ours that the guest may not have."""

    ordinal: int  # among all frames of ours in the journal; stays when `seq` is given again after a restart
    seq: int  # the number by which the guest knows it
    segment: int  # the segment of its record
    frame: Outgoing | None  # itself, when it was read from the segments; else the channel keeps it


class SentFrames:
    """Our frames that are undelivered, in the order in which they were written."""

    def __init__(self) -> None:
        self._undelivered: deque[_Undelivered] = deque()
        self._count = 0

    def add(self, seq: int, segment: int, frame: Outgoing | None = None) -> None:
        """Notes a written frame as undelivered; with `frame` when it must be sent again from here."""
        self._undelivered.append(_Undelivered(self._count, seq, segment, frame))
        self._count += 1

    def note_delivered(self, seq: int) -> None:
        """Notes that the guest has taken our frames up to this number."""
        while self._undelivered and self._undelivered[0].seq <= seq:
            self._undelivered.popleft()

    def renumber(self, taken: int) -> None:
        """RESUMED: gives what the guest had not taken the numbers that follow; it is sent again under these."""
        self.note_delivered(taken)
        self._undelivered = deque(
            replace(frame, seq=seq) for seq, frame in enumerate(self._undelivered, start=taken + 1)
        )

    def to_send_again(self) -> list[Outgoing]:
        """Returns the frames that were read from the segments and are still undelivered."""
        return [each.frame for each in self._undelivered if each.frame is not None]

    @property
    def seqs(self) -> list[int]:
        return [frame.seq for frame in self._undelivered]

    @property
    def segments(self) -> set[int]:
        """The segments that hold undelivered frames."""
        return {frame.segment for frame in self._undelivered}

    def snapshot(self) -> dict[str, Any]:
        """Returns the fields of the journal's snapshot."""
        return {"sent": self._count, "on_their_way": {frame.ordinal: frame.seq for frame in self._undelivered}}

    def restore(self, known: Fields) -> None:
        """Takes over a snapshot: what is not listed in it had been delivered by then. Raises FrameError."""
        self._count = known.integer("sent")
        seqs = known.object("on_their_way")
        if seqs is None:
            raise FrameError("a snapshot that does not list the frames on their way")
        there = [frame for frame in self._undelivered if str(frame.ordinal) in seqs]
        self._undelivered = deque(replace(frame, seq=seqs.integer(str(frame.ordinal))) for frame in there)
