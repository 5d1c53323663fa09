"""Tool calls of the current run: from the interpreter to the daemon, and answers back.

Calls are opened or refused here, so the daemon never sees a call of an unknown tool, or more open calls or bytes of
arguments than the limits allow.
"""

from __future__ import annotations

import os

from ..wire.link_messages import STOPS, ToolReply
from .run import Call

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..wire.messages import ToolResult
    from .child_processes import ChildProcesses
    from .run import Run


class ToolCalls:
    """Keeps the names of the tools whose calls the client answers, and of those whose answer is final."""

    def __init__(self, child_processes: ChildProcesses) -> None:
        self._child_processes = child_processes
        self.tools: frozenset[str] = frozenset()
        self.final_tools: frozenset[str] = frozenset()

    def accept(self, run: Optional[Run], call: Call) -> bool:
        """True if the call may be opened now; refuses it otherwise."""
        if run is None or not run.visible or run.ended_by is not None:
            self.refuse(call, "no execution is running that could call a tool")
        elif call.name not in self.tools:
            self.refuse(call, "the session has no such tool any more")
        elif why_not := run.why_no_call(call.size):
            self.refuse(call, why_not)
        else:
            return True
        return False

    def refuse(self, call: Call, message: str) -> None:
        """Raises RuntimeError in the program, at the call."""
        self._child_processes.post(_refusal(call), message.encode())

    def refuse_open(self, run: Run) -> None:
        """Refuses the open calls of an ended run, whose threads would wait for ever."""
        while run.calls:
            self.refuse(run.calls.popitem()[1], "the execution ended before the tool had answered")
        run.set_clock()

    def on_result(self, run: Optional[Run], result: ToolResult, body: bytes, fd: Optional[int]) -> None:
        """Passes the daemon's answer to the program; `fd` is its memory file, if any. A late answer is dropped."""
        if run is None or run.request.id != result.id or result.call not in run.calls:
            if fd is not None:
                os.close(fd)
            return
        call = run.calls.pop(result.call)
        if not result.ok:
            size = result.arguments or 0
            reply = ToolReply(call=call.waiting_id, ok=False, type=result.type or "", arguments=size)
        elif result.blob is not None and fd is None:
            reply, body = _refusal(call), b"the tool's answer did not arrive whole"
        else:
            final = call.name in self.final_tools
            reply = ToolReply(call=call.waiting_id, ok=True, final=final)
            if final and run.ended_by not in STOPS:
                run.final_call_id = run.final_call_id or result.call
        self._child_processes.post(reply, body, memfd=fd)
        run.set_clock()


def _refusal(call: Call) -> ToolReply:
    return ToolReply(call=call.waiting_id, ok=False, type="RuntimeError")
