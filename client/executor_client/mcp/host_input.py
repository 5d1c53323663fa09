"""Relays the host's messages to the SDK, up to a size limit, until the host or a signal ends the input.

The SDK reads stdin in a thread that only the end of the input wakes up, and it reads lines of any length. So the host's
stdin is read here and relayed through a pipe. The pipe is closed when the host closes its side, on a stop signal, and
if a message is too large. The SDK then cancels running calls, and our sessions end.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

MESSAGE_BYTES_MAX = 64 << 20
"""Bytes of one message of the host, which is one line."""
PIECE_BYTES = 65_536

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def relay_stdin(report: Callable[[str], None]) -> Callable[[], None]:
    """Replaces fd 0 by a pipe, for the rest of the process's life. Returns a function that ends the input.

    The first stop signal ends the input too; a second one of the same kind ends the process by its default action.
    `report` is called with a sentence, in a thread.
    """
    source = os.dup(0)
    relayed, pipe = os.pipe()
    os.dup2(relayed, 0)
    os.close(relayed)
    stop, wake = os.pipe()

    def end() -> None:
        os.write(wake, b".")

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        end()

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    # A daemon thread, because the host may keep its side open for ever.
    threading.Thread(target=copy_input, args=(source, pipe, stop, report), name="host-input", daemon=True).start()
    return end


def copy_input(source: int, pipe: int, stop: int, report: Callable[[str], None]) -> None:
    """Copies `source` into `pipe` until either ends or `stop` is readable, then closes `pipe`."""
    poll = select.poll()  # unlike epoll, it accepts files and /dev/null
    poll.register(source, select.POLLIN)
    poll.register(stop, select.POLLIN)
    line_bytes = 0
    try:
        while not any(descriptor == stop for descriptor, _ in poll.poll()):
            data = os.read(source, PIECE_BYTES)
            if not data:
                return
            first, *others = data.split(b"\n")
            longest_bytes = max(line_bytes + len(first), *map(len, others), 0)
            line_bytes = len(others[-1]) if others else longest_bytes
            view = memoryview(data)
            while view:
                view = view[os.write(pipe, view) :]
            if longest_bytes > MESSAGE_BYTES_MAX:
                report(f"closing the connection: a message of the host has more than {MESSAGE_BYTES_MAX:,} bytes")
                return
    except OSError:
        return  # the host's side broke, or the SDK no longer reads: both end the input
    finally:
        os.close(pipe)
