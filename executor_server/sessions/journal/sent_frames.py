"""Our frames that the guest may not have, as recorded in a journal.

Each has an ordinal among all our frames in the journal. A restarted daemon renumbers the frames that the guest had not
taken, so only the ordinal identifies a frame for good.
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
    """One of our frames that the guest may not have."""

    ordinal: int  # among all our frames in the journal; stays when `seq` changes after a restart
    seq: int  # the number by which the guest knows it
    segment: int  # the segment of its record
    frame: Outgoing | None  # if it was read from the segments; otherwise the channel keeps it


class SentFrames:
    """Our undelivered frames, in the order of their records."""

    def __init__(self) -> None:
        self._undelivered: deque[_Undelivered] = deque()
        self._count = 0

    def add(self, seq: int, segment: int, frame: Outgoing | None = None) -> None:
        """Notes a recorded frame as undelivered; with `frame` if `to_send_again` must return it."""
        self._undelivered.append(_Undelivered(self._count, seq, segment, frame))
        self._count += 1

    def note_delivered(self, seq: int) -> None:
        """Notes that the guest has taken our frames up to this number."""
        while self._undelivered and self._undelivered[0].seq <= seq:
            self._undelivered.popleft()

    def renumber(self, taken: int) -> None:
        """RESUMED: renumbers the frames that the guest had not taken, which are sent again."""
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
        """Takes over a snapshot; frames that it does not list had been delivered. Raises FrameError."""
        self._count = known.integer("sent")
        seqs = known.object("on_their_way")
        if seqs is None:
            raise FrameError("a snapshot that does not list the frames on their way")
        there = [frame for frame in self._undelivered if str(frame.ordinal) in seqs]
        self._undelivered = deque(replace(frame, seq=seqs.integer(str(frame.ordinal))) for frame in there)
