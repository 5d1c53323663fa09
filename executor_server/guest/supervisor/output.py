"""A run's output: read from its pipes, cut to its limit, decoded, and sent to the daemon in joined frames.

The first piece is sent at once; pieces that follow within `_COALESCE_S` are read and sent together. Output up to half
of the limit is sent as it comes. Of the rest, a ring keeps the newest bytes, up to the other half of the limit. They
are sent at the end, after the number of omitted bytes.
"""

from __future__ import annotations

import codecs
import time

from ..checks.offline import says_not_installed, says_offline
from ..processes.pipe import READ_BYTES
from ..wire.frames import CHUNK_BYTES
from ..wire.guest_channel import Channel
from ..wire.lean import deque
from ..wire.loop import READ, Loop
from ..wire.messages import Log, OutputCut
from .outcomes import says_no_memory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    from ..processes.pipe import Pipe
    from .run import Run

# Multiple of its limit at which a program is stopped for printing endlessly.
STOP_FACTOR = 16
# Pieces of the tail, and the bytes up to which neighbours of one stream are joined, so that tiny writes stay cheap.
_MAX_PIECES = 4096
_JOIN_BYTES = 4096
_COALESCE_S = 0.005
# Bytes of the output that are searched for network errors.
_SCANNED_BYTES = 256 * 1024
# Lines around output of earlier runs' processes.
BACKGROUND_BEGIN = "[background output of earlier steps]"
BACKGROUND_END = "[end of background output]"
# Characters of a piece: at most 4 bytes each in UTF-8, so that it fits into a chunk.
_LOG_CHARS = CHUNK_BYTES // 4

# Reads of one pipe in a turn of the loop, so that a program that prints endlessly cannot starve the rest.
_READS_PER_EVENT = 8
# Reads before an event, so that a background process that prints endlessly cannot delay a result.
_READS_PER_DRAIN = 64


class LogRelay:
    """The output of one run."""

    def __init__(self, channel: Channel, execution_id: str, limit_bytes: int) -> None:
        self._channel = channel
        self._execution_id = execution_id
        self._cutter = OutputCutter(limit_bytes)
        self._decoder = StreamDecoder()
        self._pending: list[tuple[str, bytes]] = []
        self._last_sent = 0.0
        self._background_bytes = 0
        self._unscanned_bytes = _SCANNED_BYTES
        self.offline = False  # the program, or a child, has printed a network error
        self.not_installed = False  # it, or a child, has printed that a package could not be installed
        self.no_memory = False  # it has printed that it ends for lack of memory
        self._lines_open: set[str] = set()  # streams whose last line is unfinished
        self.due: Optional[float] = None  # when to call `flush`

    @property
    def total_bytes(self) -> int:
        return self._cutter.total_bytes + self._background_bytes

    @property
    def flooded(self) -> bool:
        return self._cutter.flooded

    def add(self, stream: str, data: bytes) -> None:
        if self._unscanned_bytes > 0:
            self._unscanned_bytes -= len(data)
            self.offline = self.offline or says_offline(data)
            self.no_memory = self.no_memory or (stream == "stderr" and says_no_memory(data))
            self.not_installed = self.not_installed or says_not_installed(data)
        now = self._cutter.feed(stream, data)
        if now and self._execution_id:
            self._pending.append((stream, now))
            if self.due is None:
                self.due = max(time.monotonic(), self._last_sent + _COALESCE_S)

    def flush(self) -> None:
        """Sends the waiting pieces; neighbours of one stream are joined."""
        self.due = None
        pending, self._pending = self._pending, []
        if not pending:
            return
        self._last_sent = time.monotonic()
        start = 0
        for index in range(1, len(pending) + 1):
            if index == len(pending) or pending[index][0] != pending[start][0]:
                stream = pending[start][0]
                self.say(stream, self._decoder.decode(stream, b"".join(data for _, data in pending[start:index])))
                start = index

    def finish(self) -> None:
        """Sends the waiting pieces, the number of omitted bytes, and the tail."""
        self.flush()
        if not (self._execution_id and self._cutter.total_bytes):
            return
        tail = self._cutter.drain()
        if self._cutter.omitted_bytes:
            self._decoder = StreamDecoder()
            self._channel.send(OutputCut(id=self._execution_id, omitted=self._cutter.omitted_bytes))
        for stream, data in tail:
            self.say(stream, self._decoder.decode(stream, data))
        for stream, text in self._decoder.reset():
            self.say(stream, text)

    def say_background(self, stream: str, data: bytes, total_bytes: int) -> None:
        """Sends output of earlier runs' processes between two marker lines; it counts as output of this run."""
        self._background_bytes += total_bytes
        before = "\n" if stream in self._lines_open else ""
        text = data.decode("utf-8", "replace")
        after = "" if text.endswith("\n") else "\n"
        self.say(stream, f"{before}{BACKGROUND_BEGIN}\n{text}{after}{BACKGROUND_END}\n")

    def say_notice(self, text: str) -> None:
        """Sends a notice on its own lines; it does not count as output of the run."""
        self.say("stderr", "\n" + text if "stderr" in self._lines_open else text)

    def say(self, stream: str, text: str) -> None:
        """Sends a text without counting or cutting it."""
        if text:
            (self._lines_open.discard if text.endswith("\n") else self._lines_open.add)(stream)
        for start in range(0, len(text), _LOG_CHARS):
            data = text[start : start + _LOG_CHARS].encode("utf-8", "replace")  # a notice may hold lone surrogates
            self._channel.send(Log(id=self._execution_id, stream=stream), data)


class ProgramOutput:
    """Reads the pipes of the current run into its `LogRelay`, a bounded amount in each turn of the loop.

    Backpressure: while the daemon takes no events, the pipes are not read. They fill, the program blocks in its write,
    and its clock stands still (`Run.hold`). So a slow daemon costs neither memory here nor the program's time.
    `on_flood` is called once when a run prints far past its limit.
    """

    def __init__(self, loop: Loop, on_flood: Callable[[Run], None]) -> None:
        self._loop = loop
        self._on_flood = on_flood
        self.paused = False

    def watch(self, run: Run) -> None:
        """Starts reading the pipes, unless `paused`."""
        for pipe in run.pipes:
            handler = None if self.paused or pipe.ended else self._reader_of(run, pipe)
            self._loop.watch(pipe.read_fd, READ, handler, last=True)

    def forget(self, run: Run) -> None:
        """Stops reading the pipes."""
        for pipe in run.pipes:
            self._loop.watch(pipe.read_fd, 0, None)

    def drain(self, run: Run) -> None:
        """Reads and sends all output written before the current message, so that events keep their order."""
        for pipe in run.pipes:
            for _ in range(_READS_PER_DRAIN):
                if pipe.ended or not self._read(run, pipe):
                    break
        run.logs.flush()

    def _reader_of(self, run: Run, pipe: Pipe) -> Callable[[int], None]:
        def on_readable(_events: int) -> None:
            for _ in range(_READS_PER_EVENT):
                if self._read(run, pipe) < READ_BYTES:
                    break
            if pipe.ended:
                self._loop.watch(pipe.read_fd, 0, None)
                pipe.close()
            else:
                pipe.make_large()

        return on_readable

    def _read(self, run: Run, pipe: Pipe) -> int:
        data = pipe.read()
        if data:
            run.logs.add(pipe.stream, data)
            if run.logs.flooded and run.ended_by is None:
                self._on_flood(run)
        return len(data)


class OutputCutter:
    """Counts and cuts the bytes of both streams together, in order of arrival."""

    def __init__(self, limit_bytes: int) -> None:
        self.total_bytes = 0
        self.omitted_bytes = 0
        self._stop_bytes = limit_bytes * STOP_FACTOR
        self._head_left = limit_bytes // 2
        self._tail_limit = limit_bytes - self._head_left
        self._tail: deque[tuple[str, bytearray]] = deque()
        self._tail_bytes = 0

    @property
    def flooded(self) -> bool:
        return self.total_bytes > self._stop_bytes

    def feed(self, stream: str, data: bytes) -> bytes:
        """Counts bytes of a stream; returns those to send now."""
        self.total_bytes += len(data)
        now = data[: self._head_left]
        self._head_left -= len(now)
        rest = data[len(now) :]
        if rest:
            self._keep(stream, rest)
        return now

    def _keep(self, stream: str, data: bytes) -> None:
        if self._tail and self._tail[-1][0] == stream and len(self._tail[-1][1]) < _JOIN_BYTES:
            self._tail[-1][1].extend(data)
        else:
            self._tail.append((stream, bytearray(data)))
        self._tail_bytes += len(data)
        while self._tail_bytes > self._tail_limit or len(self._tail) > _MAX_PIECES:
            _, oldest = self._tail[0]
            excess = self._tail_bytes - self._tail_limit
            dropped = excess if 0 < excess < len(oldest) else len(oldest)
            if dropped == len(oldest):
                self._tail.popleft()
            else:
                del oldest[:dropped]
            self._tail_bytes -= dropped
            self.omitted_bytes += dropped

    def drain(self) -> list[tuple[str, bytes]]:
        """Removes and returns the tail."""
        tail = [(stream, bytes(data)) for stream, data in self._tail]
        self._tail.clear()
        self._tail_bytes = 0
        return tail


class StreamDecoder:
    """Decodes the UTF-8 of each stream, in pieces cut anywhere; invalid bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoders: dict[str, codecs.IncrementalDecoder] = {}  # made when a stream begins: most runs print nothing

    def decode(self, stream: str, data: bytes) -> str:
        decoder = self._decoders.get(stream)
        if decoder is None:
            decoder = self._decoders[stream] = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(data)

    def reset(self) -> list[tuple[str, str]]:
        """Returns the replacement of an incomplete character at the end of each stream."""
        return [(name, decoder.decode(b"", True)) for name, decoder in self._decoders.items()]
