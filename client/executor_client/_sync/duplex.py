"""A gRPC call with streams in both directions that is read in the caller's own thread.

gRPC's blocking stubs for such calls start a thread that sends, and hand each message that arrives from a thread of the
channel to its reader: two hops between threads in each direction, more than all the rest of a small call. For one
request with a stream of answers they can do without (`ChannelOptions.SingleThreadedUnaryStream`). This does for both
directions what they do there, with the same calls into gRPC's core. Those are no public interface: where they are not
as expected, `can_open` is False and plain calls are made instead.
"""

from __future__ import annotations

from typing import Any

from executor_client._core.conversation import Ended
from executor_client._core.quiet_grpc import grpc
from executor_client._core.tracing import Metadata

cygrpc: Any = getattr(getattr(grpc, "_cython", None), "cygrpc", None)

_NEEDED = (
    "SendInitialMetadataOperation",
    "SendMessageOperation",
    "ReceiveInitialMetadataOperation",
    "ReceiveMessageOperation",
    "ReceiveStatusOnClientOperation",
)
_NO_FLAGS = 0
_OPENED, _SENT, _RECEIVED, _STATUS = "opened", "sent", "received", "status"


def can_open(channel: grpc.Channel) -> bool:
    """True when gRPC's core can be called as this module does."""
    core = getattr(channel, "_channel", None)
    return hasattr(core, "segregated_call") and all(hasattr(cygrpc, name) for name in _NEEDED)


class DuplexCall:
    """One call. One thread reads at a time; any thread may send and cancel."""

    def __init__(self, channel: grpc.Channel, method: str, metadata: Metadata, first: bytes) -> None:
        """Starts the call with its first message, which is on its way before the answer to the headers has come."""
        self.has_sent = False
        """True when the message before has left, so that the next one may be sent."""
        self._due = {_OPENED, _SENT, _RECEIVED, _STATUS}
        begin = (
            cygrpc.SendInitialMetadataOperation(metadata, _NO_FLAGS),
            cygrpc.SendMessageOperation(first, _NO_FLAGS),
        )
        operations = (
            (begin, _SENT),
            ((cygrpc.ReceiveStatusOnClientOperation(_NO_FLAGS),), _STATUS),
            ((cygrpc.ReceiveInitialMetadataOperation(_NO_FLAGS),), _OPENED),
            ((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), _RECEIVED),
        )
        core: Any = channel
        self._call = core._channel.segregated_call(
            cygrpc.PropagationConstants.GRPC_PROPAGATE_DEFAULTS, method.encode(), None, None, metadata, None, operations
        )
        self._status: Ended | None = None

    @property
    def is_over(self) -> bool:
        """True when everything was read, so that nothing of the call is left in gRPC."""
        return not self._due

    def send(self, message: bytes) -> bool:
        """Sends a message; only when `has_sent`. Returns False when the call has ended."""
        if _STATUS not in self._due:
            return False
        self.has_sent = False
        self._due.add(_SENT)
        if not self._call.operate((cygrpc.SendMessageOperation(message, _NO_FLAGS),), _SENT):
            self._due.discard(_SENT)
            return False
        return True

    def wait(self) -> Any:
        """Waits for what happens next, which must be given to `take`."""
        return self._call.next_event()

    def take(self, event: Any) -> bytes | None:
        """Returns the message that has come; None where something else has happened."""
        self._due.discard(event.tag)
        if event.tag == _RECEIVED:
            message: bytes | None = event.batch_operations[0].message()
            if message is not None and self._call.operate((cygrpc.ReceiveMessageOperation(_NO_FLAGS),), _RECEIVED):
                self._due.add(_RECEIVED)
            return message
        if event.tag == _SENT:
            self.has_sent = True
        elif event.tag == _STATUS:
            (status,) = event.batch_operations
            self._status = Ended(status.code(), status.details() or "", status.trailing_metadata() or ())
        return None

    def status(self) -> Ended:
        """Returns the status of a call that is over."""
        return self._status or Ended(grpc.StatusCode.CANCELLED.value[0], "interrupted", ())

    def broken(self) -> None:
        """Notes that reading was interrupted, after which gRPC has dropped the call."""
        self._due.clear()

    def cancel(self) -> None:
        """Ends the call early; what is left of it must still be read."""
        self._call.cancel(grpc.StatusCode.CANCELLED.value[0], "Locally cancelled by application!")
