"""Sends results, with the interpreter's generation, whether variables were kept, and notices."""

from __future__ import annotations

from ..wire import link
from ..wire.frames import CHUNK_BYTES
from ..wire.lean import dumps
from ..wire.messages import ErrorDetail, Result
from ..wire.savepoint_messages import MAX_REASON_CHARS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional

    from ..wire.guest_channel import Channel
    from ..wire.savepoint_messages import BranchEnded
    from .run import Run


# The most notices between two results: an idle session may be refused connections for hours.
_MAX_NOTICES = 64


class Results:
    """Sends results, and collects what happens between two of them for the next one to report."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._notices: list[str] = []
        self._variables = "kept"
        self.generation = 1

    def notify(self, notice: str) -> None:
        """Adds a line to the stderr of the next result, up to a limit."""
        if len(self._notices) < _MAX_NOTICES:
            self._notices.append(notice)

    def notify_reset(self, why: str) -> None:
        """Makes the next result say that variables were reset, and why."""
        self.notify(f"the interpreter was replaced, and variables were reset: {why}\n")

    def note_replaced(self) -> None:
        """Notes that the interpreter was replaced: the next result reports reset variables."""
        self.generation += 1
        self._variables = "reset"

    def note_rolled_back(self) -> None:
        """Notes that the new interpreter has the variables of a savepoint."""
        self._variables = "rolled_back"

    def note_rollback_requested(self) -> None:
        """Notes that the session went back to a savepoint at its client's request."""
        self._variables = "kept"

    def send(self, run: Run, outcome: str, detail: Optional[ErrorDetail], branch: Optional[BranchEnded] = None) -> None:
        wall_time_s = run.wall_time_s()  # first: finding artifacts and sending the value can take long
        for notice in self._notices:
            run.logs.say("stderr", notice)
        self._notices = []
        error_body = dumps(detail.head()) if detail else b""
        artifacts, truncated = run.artifacts.found() if run.artifacts is not None else ([], False)
        listed = dumps([artifact.head() for artifact in artifacts]) if artifacts else b""
        branched = dumps(branch.head()) if branch is not None else b""
        payload, output = self._output_of(run) if outcome == "succeeded" else ({}, b"")
        result = Result(
            id=run.request.id,
            outcome=outcome,
            error=len(error_body),
            variables=self._variables,
            generation=self.generation,
            final=run.final_call_id,
            operations=run.operations,
            wall_time_s=wall_time_s,
            cpu_time_s=run.cpu_time_s,
            peak_memory_bytes=run.peak_memory_bytes,
            output_bytes=run.logs.total_bytes,
            oom_suspect=run.oom_suspect,
            artifacts=len(listed) if listed or truncated else None,
            artifacts_truncated=truncated if listed or truncated else None,
            imports=run.imports or None,
            savepoint=run.savepoint,
            savepoint_refused=run.savepoint_refused[:MAX_REASON_CHARS] or None,
            branch=len(branched) or None,
            **payload,
        )
        self._variables = "kept"
        self._channel.send(result, error_body + listed + branched + output)

    def _output_of(self, run: Run) -> tuple[dict[str, Any], bytes]:
        """Takes the run's value. Returns the fields that describe it, and its bytes if they fit into the frame."""
        output, run.output = run.output, None
        if output is None:
            return {}, b""
        if run.output_size > CHUNK_BYTES:
            blob_id = self._channel.send_blob(output, run.output_size, execution_id=run.request.id)
            return {"blob": blob_id, "size": run.output_size}, b""
        data = output if isinstance(output, bytes) else link.read_memfd(output, run.output_size)
        return {"output": run.output_size}, data
