"""The session's prelude: code that runs in each new interpreter before the session's own.

It is a run without an id, and sends no events. Its end answers CONFIGURE. In a replaced interpreter, a failed prelude
becomes a notice in the next result.
"""

from __future__ import annotations

from ..wire.messages import Execute
from .run import lowered

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from ..wire.guest_channel import Channel
    from ..wire.messages import ErrorDetail
    from ..wire.session_rules import ExecutionMax
    from .results import Results
    from .runner import Runner

# Characters of the failed statement that an error quotes.
_STATEMENT_CHARS = 200
REQUEST = Execute(
    id="",
    mode="trailing_expression",
    asked={},
    wall_time_s=60.0,
    cpu_time_s=60.0,
    operations=10**9,
    output_bytes=64 * 1024,
    policy="",
)


class Prelude:
    """Keeps the source; `due` while it has to run again in a new interpreter."""

    def __init__(self, channel: Channel, runner: Runner, results: Results) -> None:
        self._channel = channel
        self._runner = runner
        self._results = results
        self._request = REQUEST
        self._configuring: Optional[int] = None  # the request that waits for the prelude's end
        self._booting: Optional[tuple[int, str]] = None  # the request that waits for the interpreter, and its prelude
        self.source = ""
        self.due = False

    def limit(self, ceilings: Optional[ExecutionMax]) -> None:
        self._request = lowered(REQUEST, ceilings)

    def configure(self, op: int, source: str) -> None:
        self.source = source
        if source:
            self._configuring = op
            self.begin()
        else:
            self._channel.done(op)

    def configure_booted(self, op: int, source: str) -> None:
        """As `configure`, once the interpreter has booted: some environment variables keep Python from starting."""
        self._booting = op, source

    def note_booted(self) -> None:
        if self._booting is not None:
            booting, self._booting = self._booting, None
            self.configure(*booting)

    def refuse_variables(self, variables: dict[str, str]) -> bool:
        """Refuses the request that waits for an interpreter, which did not start; False if none waits."""
        if self._booting is None:
            return False
        (op, _), self._booting = self._booting, None
        problem = f"env: Python does not start with these variables: {', '.join(sorted(variables))}"
        self._channel.fail(op, "variable_refused", f"{problem}; correct or remove the one that stops it")
        return True

    def begin(self) -> None:
        self.due = False
        self._runner.begin(self._request, self.source)

    def end(self, outcome: str, detail: Optional[ErrorDetail]) -> None:
        failure = "" if outcome == "succeeded" else _failure(outcome, detail)
        op, self._configuring = self._configuring, None
        if op is None:
            if failure:
                self._results.notify(f"{failure}\n")
        elif failure:
            self._channel.fail(op, "prelude_failed", failure)
        else:
            self._channel.done(op)


def _failure(outcome: str, detail: Optional[ErrorDetail]) -> str:
    """Returns one line: the prelude's traceback and output are not reported."""
    if detail is None:
        return f"the prelude ended as {outcome}"
    statement = detail.statement.split("\n", 1)[0][:_STATEMENT_CHARS]
    place = f" at '{statement}'" if statement else ""
    cause = ": ".join(part for part in (detail.type, detail.message) if part)
    return f"the prelude ended as {outcome}{place}: {cause}"
