"""The interpreter's reports of the current run: its value, images, tool calls, warnings, and its end.

Any of them may be agent code's, which has the interpreter's memory. Each is accepted only while the run expects it, and
can harm no other run. Two invariants:

- Order is what the program did: before a report becomes an event, the run's pipes are drained, so that output written
  before an image or a tool call is reported before it. The program waits for the reply.
- An end names its run. Agent code can declare a run ended while its code goes on; the true end, which comes later, must
  not end the next run.
"""

from __future__ import annotations

from executor_api.limits import VALUE_BYTES_MAX

from ..wire import link
from ..wire.frames import FrameError
from ..wire.guest_channel import Channel
from ..wire.link_messages import CalledTool, ImageReply, NearLimit, ProgramEnded, ProgramStopped, ShownImage
from ..wire.messages import ErrorDetail, Image, LimitWarning, ToolCall
from ..wire.schema import read_object
from .child_processes import ChildProcesses
from .log_relay import ProgramOutput
from .outcomes import MAX_ERROR_BYTES
from .run import Call, Phase, Run

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Union

    from .runner import Runner


class ProgramReports:
    """Turns reports into events of the daemon and changes of the runner's run."""

    def __init__(
        self, runner: Runner, channel: Channel, child_processes: ChildProcesses, output: ProgramOutput
    ) -> None:
        self._runner = runner
        self._channel = channel
        self._child_processes = child_processes
        self._output = output

    def on_output(self, packet: link.Packet) -> None:
        """Keeps the program's value, which comes by itself when it is large. Raises FrameError."""
        run = self._runner.run
        if run is None or run.output is not None:
            raise FrameError("a value that was not asked for")
        if packet.size > VALUE_BYTES_MAX:
            raise FrameError(f"a value of {packet.size} bytes")
        run.output, run.output_size = _data(packet), packet.size

    def on_image(self, shown: ShownImage, packet: link.Packet) -> None:
        run = self._runner.run
        left_out = ""
        if run is not None and run.visible and not (left_out := run.take_image(packet.size, shown.mime)):
            self._output.drain(run)
            image = Image(id=run.execution_id, mime=shown.mime, source=shown.source)
            self._channel.send_payload(image, _data(packet), packet.size)
        # The reply lets the program go on; what it prints from here on belongs after the image.
        self._child_processes.post(ImageReply(call=shown.call, left_out=left_out))

    def on_tool_call(self, called: CalledTool, packet: link.Packet) -> None:
        run = self._runner.run
        call = Call(called.name, called.call, packet.size)
        if self._runner.tool_calls.accept(run, call):
            assert run is not None
            self._output.drain(run)
            event = ToolCall(id=run.execution_id, call=run.open_call(call), name=call.name)
            self._channel.send_payload(event, _data(packet), packet.size)
            run.set_clock()

    def on_limit(self, near: NearLimit) -> None:
        """Warns: the program has spent nearly all of a budget. Raises FrameError."""
        run = self._runner.run
        if run is None or run.phase != Phase.RUNNING or near.limit not in run.warnings:
            raise FrameError(f"a warning of {near.limit!r} that was not asked for")
        self._output.drain(run)
        self._send_warning(run, near.limit)

    def on_stopped(self, stopped: ProgramStopped) -> None:
        """Counts nothing of the program from now on, and ends it soon if something has swallowed its stop."""
        run = self._runner.run
        if run is not None and run.phase == Phase.RUNNING and run.ended_by is None:
            run.ended_by = stopped.outcome
            run.note_interrupted()

    def warn(self, run: Run, spent: int) -> None:
        """Sends the warnings that are due at so many operations and were not sent yet."""
        for limit in [limit for limit, warning in run.warnings.items() if warning.mark <= spent]:
            self._send_warning(run, limit)

    def _send_warning(self, run: Run, limit: str) -> None:
        warning = run.warnings.pop(limit)
        self._channel.send(LimitWarning(id=run.execution_id, limit=limit, used=warning.used, budget=warning.budget))

    @property
    def max_end_bytes(self) -> int:
        """Largest body of the message that ends a program: its error, and a value if it is small."""
        runs = self._runner.run is not None and self._runner.run.phase == Phase.RUNNING
        return MAX_ERROR_BYTES + link.INLINE_BYTES if runs else 0

    def on_done(self, ended: ProgramEnded, body: bytes) -> None:
        """Ends the run: the program has ended, and the interpreter lives. Raises FrameError."""
        run = self._runner.run
        # The name distinguishes this run's end from the late end of one that agent code has declared ended before.
        if run is None or run.phase != Phase.RUNNING or ended.filename != run.filename:
            raise FrameError("the end of a run that does not run")
        if ended.operations > run.budget or ended.error > len(body):
            raise FrameError("more operations than the run has, or an error longer than the body")
        if ended.error > MAX_ERROR_BYTES:
            raise FrameError(f"an error of {ended.error} bytes")
        detail = read_object(ErrorDetail, body[: ended.error], "an error") if ended.error else None
        run.operations = ended.operations
        self._runner.budget.settle(run)
        self._output.drain(run)
        if ended.error < len(body) and run.output is None:
            run.output, run.output_size = body[ended.error :], len(body) - ended.error
        self.warn(run, spent=run.operations)
        if run.calls:
            self._runner.tool_calls.refuse_open(run)
        self._runner.finish(run, ended.outcome, detail)


def _data(packet: link.Packet) -> Union[bytes, int]:
    """Returns the body, or the memory file that holds it, which is the caller's from here on."""
    memfd = packet.take_memfd()
    return packet.body if memfd is None else memfd
