"""What the host writes, on its way to the SDK: with a limit, and with an end that a signal can bring about.

The SDK reads stdin in a thread that nothing but the end of the input wakes up, and reads lines of any length. So the
host's stdin is read here and passed on through a pipe, whose closing is that end: when the host closes its side, when a
signal asks us to stop, when a message is larger than is accepted. The SDK then cancels what runs, and our sessions end.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable

MESSAGE_BYTES_MAX = 64 << 20
"""Of one message of the host, which is one line."""
PIECE_BYTES = 65_536

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def relay_stdin(complain: Callable[[str], None]) -> Callable[[], None]:
    """Puts a pipe in the place of fd 0, for the rest of the process's life. Returns what ends the input.

    So does the first signal to stop; the second one of its kind ends the process as it would any. `complain` is called,
    in a thread, with a sentence.
    """
    source = os.dup(0)
    passed_on, pipe = os.pipe()
    os.dup2(passed_on, 0)
    os.close(passed_on)
    stop, wake = os.pipe()

    def end() -> None:
        os.write(wake, b".")

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        end()

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)
    # A daemon thread: the host may keep its side open for as long as it likes.
    relay = threading.Thread(target=pass_on, args=(source, pipe, stop, complain), name="host-input", daemon=True)
    relay.start()
    return end


def pass_on(source: int, pipe: int, stop: int, complain: Callable[[str], None]) -> None:
    """Copies what comes from `source` into `pipe`, then closes `pipe`."""
    poll = select.poll()  # it takes files and /dev/null too
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
                complain(f"a message of the host has more than {MESSAGE_BYTES_MAX:,} bytes; the connection ends here")
                return
    except OSError:
        return  # the host's side broke, or nobody reads any more: both are the end of the input
    finally:
        os.close(pipe)
