"""The window of numbered frames: those that one end of the channel may have to resend, and the last one it received.

Theory of operation. A connection can break at any byte, and neither end learns how much of its output has arrived. So
each end numbers its frames from 1 and keeps each one until the other end has acknowledged it. At the start of a new
connection each end reports the last frame that it has taken (HELLO, READY), and the other end sends the later ones
again, in order. Daemon and guest use the same code, which reads no clock and touches no socket. A frame without a
number (0: HELLO, READY, PING, PONG, ACK) belongs to its connection alone.

The invariants, between two calls:

    acked <= sent, and the frames kept are exactly acked + 1 … sent, in order
    the first `_given` of them were handed to the current connection, the others will be
    taken rises by one at a time, or is set once, before the first frame (`adopt`)

The promises of the channel follow. Nothing is lost: a frame leaves the window only when the other end has reported that
it has taken it. Nothing arrives twice, and the order is kept: `accept` takes number taken + 1 and no other. Memory is
bounded if the caller stops its source while `full`: then at most KEPT_BYTES and one frame are kept.

Races. If the connection breaks after a frame has arrived and before its acknowledgement has, the frame is sent again:
its number is not above `taken`, and it is skipped, not refused. An acknowledgement is as old as the frame that carries
it, which may have waited for a socket or be sent again. So an acknowledgement older than the last one is normal, and
ignored. A frame that was half written when the connection broke counts as given, and so is sent again from its start.

Attacks. The daemon's peer is a sandbox. No correct peer leaves a gap in the numbers, or acknowledges a frame that was
never sent: both raise FrameError before anything is changed. Otherwise a guest could acknowledge frames in advance, and
a request would seem delivered. A guest that acknowledges nothing costs the daemon KEPT_BYTES. A guest that lies about
the frames it has taken loses only its own frames.

A later daemon replaces one that was killed. It knows the guest's frames that are in its journal, and none of its
predecessor's own frames: the guest reports where the numbers continue (`adopt`).
"""

from __future__ import annotations

from .frames import FrameError, encode_frame, encode_prefix
from .lean import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

ACK_BYTES = 1024 * 1024
"""Received bytes after which an acknowledgement is due, if no frame has carried one meanwhile."""
KEPT_BYTES = 8 * 1024 * 1024
"""Kept bytes above which the sender has to wait: eight acknowledgements, so a prompt peer never makes it wait."""


class Numbered:
    """A frame with a number. `body` belongs to the caller: bytes, or a description of their place."""

    __slots__ = ("ack", "body", "prefix", "seq", "size")

    def __init__(self, seq: int, ack: int, prefix: bytes, body: Any, size: int) -> None:
        self.seq = seq
        self.ack = ack  # the acknowledgement that it carries
        self.prefix = prefix  # the bytes before the body
        self.body = body
        self.size = size  # bytes of prefix and body


class Sequenced:
    """One end's window. Methods that return a list return released frames, whose files the caller closes."""

    def __init__(self) -> None:
        self.sent = 0  # the number of this end's last frame
        self.acked = 0  # the last of them that was acknowledged
        self.taken = 0  # the number of the other end's last frame
        self.kept_bytes = 0
        self._kept: deque[Numbered] = deque()
        self._given = 0  # frames of `_kept`, from the left, that the current connection was given
        self._unconfirmed_bytes = 0  # bytes that arrived since the last acknowledgement was sent

    # -- sending -------------------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """True while the sender should wait for acknowledgements."""
        return self.kept_bytes > KEPT_BYTES

    @property
    def settled(self) -> bool:
        """True if the other end has acknowledged every frame."""
        return not self._kept

    @property
    def kept(self) -> tuple[Numbered, ...]:
        """The unacknowledged frames, in order."""
        return tuple(self._kept)

    def send(self, kind: int, head: dict[str, Any], body: Any = b"", body_bytes: Optional[int] = None) -> Numbered:
        """Numbers a frame and keeps it for `next_frame`."""
        size = len(body) if body_bytes is None else body_bytes
        prefix = encode_prefix(kind, head, size, seq=self.sent + 1, ack=self.taken)
        self.sent += 1
        frame = Numbered(self.sent, self.taken, prefix, body, len(prefix) + size)
        self._kept.append(frame)
        self.kept_bytes += frame.size
        return frame

    def next_frame(self) -> Optional[Numbered]:
        """Returns the next frame for the current connection; None if it has been given all."""
        if self._given == len(self._kept):
            return None
        frame = self._kept[self._given]
        self._given += 1
        if frame.ack == self.taken:
            self._unconfirmed_bytes = 0
        return frame

    def unnumbered(self, kind: int, head: dict[str, Any]) -> bytes:
        """Returns a frame for the current connection only, with the newest acknowledgement."""
        self._unconfirmed_bytes = 0
        return encode_frame(kind, head, ack=self.taken)

    def acknowledge(self, seq: int) -> list[Numbered]:
        """Releases the frames up to this number: the other end took them. Raises FrameError for a number never sent."""
        if seq > self.sent:
            raise FrameError(f"frame {seq} was acknowledged, but {self.sent} was the last one sent")
        released = []
        while self._kept and self._kept[0].seq <= seq:
            frame = self._kept.popleft()
            self._given -= self._given > 0
            self.acked = frame.seq
            self.kept_bytes -= frame.size
            released.append(frame)
        return released

    # -- receiving -----------------------------------------------------------------------------------------------

    def accept(self, seq: int) -> bool:
        """Takes the number of an arrived frame; false if it was taken before. Raises FrameError for a gap."""
        if seq <= self.taken:
            return False
        if seq != self.taken + 1:
            raise FrameError(f"frame {seq} came after frame {self.taken}")
        self.taken = seq
        return True

    def note_received(self, size: int) -> bool:
        """Counts received bytes; true if an acknowledgement should be sent by itself."""
        self._unconfirmed_bytes += size
        return self._unconfirmed_bytes > ACK_BYTES

    # -- connections ---------------------------------------------------------------------------------------------

    def reconnect(self, taken: int) -> list[Numbered]:
        """Begins a new connection. The other end reported the last frame it has taken; the rest is sent again.

        Raises FrameError, and changes nothing, if it reports a frame that was never sent.
        """
        if taken > self.sent:
            raise FrameError(f"frame {taken} was taken, but {self.sent} was the last one sent")
        self._given = 0
        return self.acknowledge(taken)

    def adopt(self, *, sent: int, taken: int) -> None:
        """Continues the numbers of this end's earlier owner, as the other end reports them, before the first frame.

        `sent` is the last of the earlier owner's frames that the other end has taken. `taken` is the last of the other
        end's frames that the earlier owner acknowledged: they were released, and can't be sent again.
        """
        assert not self._kept, "a frame was sent before the first connection"
        self.sent = self.acked = sent
        self.taken = max(self.taken, taken)

    def forget(self) -> None:
        """Drops the kept frames for good: nothing more is sent, and no number is used again."""
        self._kept.clear()
        self._given = self.kept_bytes = 0
