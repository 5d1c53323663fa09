"""Requests to the interpreter between two programs: variables, tools, and the state of the session.

One request at a time. If the interpreter dies or hangs over it, the request is refused and the supervisor replaces the
interpreter. Shipped tools are made again in the next interpreter, after the prelude. Tools that killed one interpreter
are not tried in another: they would kill it, too.

The interpreter's answers may come from agent code. Each is accepted only for the current request, and is read and
checked whole before anything is done. A wrong answer must kill the interpreter while the request is still known, so
that its caller gets a refusal and not silence.
"""

from __future__ import annotations

import os
import time

from executor_api.limits import VARIABLES_BYTES_MAX, VARIABLES_MAX, VARIABLES_NAMED_MAX

from ..files.transfers import Transfers
from ..wire import link, link_messages
from ..wire.frames import MAX_MISSING_MODULES, FrameError
from ..wire.guest_channel import Channel
from ..wire.lean import dumps
from ..wire.link_messages import Answered, CommitVariables, DropTools, ForgetVariables, Variable
from ..wire.messages import (
    MAX_NAME_CHARS,
    ExportState,
    FindModules,
    GetVariables,
    GotVariable,
    GotVariables,
    RegisterTools,
    RestoreState,
    SetVariable,
    SetVariables,
)
from ..wire.savepoint_messages import TakeSavepoint
from ..wire.schema import read_listed, read_texts
from ..wire.tools import listed_tools, places
from .child_processes import ChildProcesses
from .runner import Runner
from .tool_set import PartMissing, ToolSet, TooMuchShipped

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Sequence, Union

    from ..wire.link_messages import LinkMessage
    from ..wire.schema import Message
    from .results import Results

    OnAnswer = Callable[[Answered, bytes], None]

# Seconds for the interpreter to answer a request.
REQUEST_TIME_S = 60.0
_INLINE_TOTAL_BYTES = 512 * 1024
# Characters in the names of variables got at one time: each takes up to 12 bytes in the frame that lists them.
_MAX_NAMES_CHARS = 128 * 1024
_OF_STATES = (ExportState, RestoreState)
# Bytes of the list of a state's variables, saved and left out.
_MAX_MANIFEST_BYTES = 4 * 1024 * 1024
# Bytes of the names in an answer, as JSON.
_MAX_NAMES_BYTES = VARIABLES_NAMED_MAX * (12 * MAX_NAME_CHARS + 3) + 2


class _Request:
    """A request in progress. `tools`: it makes these. `again`: for a new interpreter, and no caller waits."""

    def __init__(self, kind: type[Message], op: int, tools: Optional[ToolSet] = None, *, again: bool = False) -> None:
        self.kind, self.op = kind, op
        self.tools, self.again = tools, again
        self.time_s = REQUEST_TIME_S
        self.deadline = time.monotonic() + self.time_s
        self.on_answer: Optional[OnAnswer] = None  # gets the answer to a request of the supervisor
        self.gathered: list[tuple[str, Union[bytes, int], int]] = []
        self.digest = ""  # digest of the state to restore

    def close(self) -> None:
        for _, data, _ in self.gathered:
            if isinstance(data, int):
                os.close(data)
        self.gathered = []
        if self.tools is not None and not self.again:
            self.tools.close()


class Requests:
    """Owns the current request, if any, and the session's tools."""

    def __init__(
        self,
        channel: Channel,
        child_processes: ChildProcesses,
        transfers: Transfers,
        runner: Runner,
        results: Results,
    ) -> None:
        self._channel = channel
        self._child_processes = child_processes
        self._transfers, self._runner = transfers, runner
        self._results = results
        self._current: Optional[_Request] = None
        self._tools = ToolSet()
        self._why_no_tools = ""  # why shipped tools are not made again: they killed an interpreter
        self.tools_due = False  # tools have to be made in a new interpreter
        # Digest of the restored state, and the answer to its request.
        self._restored: Optional[tuple[str, bytes]] = None

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def due(self) -> float:
        """Deadline of the current request."""
        return float("inf") if self._current is None else self._current.deadline

    def postpone(self) -> None:
        """Restarts the time limit while the request waits for the daemon, not for the interpreter."""
        if self._current is not None:
            self._current.deadline = time.monotonic() + self._current.time_s

    def close_all(self) -> None:
        """Closes the memory files."""
        if self._current is not None:
            self._current.close()
        self._tools.close()

    def claim_blobs(self, request: Message, body: bytes) -> list[str]:
        """Keeps the blobs of a waiting job from expiring, and returns their ids. Raises FrameError."""
        brought: list[Optional[str]] = []
        if isinstance(request, SetVariables):
            brought = [variable.blob for variable in _listed_variables(request, body)]
        elif isinstance(request, RegisterTools):
            brought = [place.blob for tool in listed_tools(request, body) for _, place in places(tool)]
        elif isinstance(request, RestoreState):
            brought = [request.blob]
        claimed = [blob_id for blob_id in brought if blob_id is not None]
        for blob_id in claimed:
            self._transfers.claim_blob(blob_id)
        return claimed

    def begin(self, request: Message, body: bytes, claimed: Sequence[str] = ()) -> None:
        """Begins a request of the daemon. Some are done at once. Drops the `claimed` blobs that a refusal left."""
        self._begin(request, body)
        for blob_id in claimed:
            self._transfers.drop_blob(blob_id)

    def _begin(self, request: Message, body: bytes) -> None:
        if isinstance(request, SetVariables):
            self._set_variables(request, body)
        elif isinstance(request, RegisterTools):
            self._register_tools(request, body)
        elif isinstance(request, ExportState):
            self._current = _Request(ExportState, request.op)
            self._child_processes.post(link_messages.ExportState(max_bytes=request.max_bytes))
        elif isinstance(request, RestoreState):
            self._restore_state(request)
        elif isinstance(request, FindModules):
            self._current = _Request(FindModules, request.op)
            self._child_processes.post(link_messages.FindModules(), body)
        else:
            assert isinstance(request, GetVariables)
            self._current = _Request(GetVariables, request.op)
            self._child_processes.post(link_messages.GetVariables(), body)

    def ask(
        self, message: LinkMessage, fds: tuple[int, ...], on_answer: OnAnswer, time_s: float = REQUEST_TIME_S
    ) -> None:
        """Sends the interpreter a message; takes over the descriptors.

        `on_answer` gets its answer, which is not ok if the interpreter died or hung. It may raise FrameError.
        """
        self._current = _Request(TakeSavepoint, 0)
        self._current.on_answer, self._current.time_s = on_answer, time_s
        self.postpone()
        self._child_processes.post(message, fds=fds)

    # -- variables -----------------------------------------------------------------------------------------------

    def _set_variables(self, request: SetVariables, body: bytes) -> None:
        position = request.listed
        for variable in _listed_variables(request, body):
            message = Variable(name=variable.name)
            if variable.blob is not None:
                fd = self._transfers.take_blob(variable.blob)
                if fd is None:
                    self._child_processes.post(ForgetVariables())
                    why = f"the bytes of variable {variable.name} did not arrive"
                    self._channel.fail(request.op, "blob_not_found", why)
                    return
                self._child_processes.post(message, memfd=fd)
            else:
                size = variable.inline or 0
                self._child_processes.post(message, body[position : position + size])
                position += size
        self._current = _Request(SetVariables, request.op)
        self._child_processes.post(CommitVariables())

    def on_variable(self, variable: Variable, packet: link.Packet) -> None:
        """Keeps a variable of the interpreter's answer. Raises FrameError."""
        request = self._current
        # The interpreter refuses more by itself; one that does not is under the control of agent code.
        if request is None or request.kind is not GetVariables or len(request.gathered) >= VARIABLES_MAX:
            raise FrameError("a variable that was not asked for, or one too many")
        if sum(size for _, _, size in request.gathered) + packet.size > VARIABLES_BYTES_MAX:
            raise FrameError("variables of too many bytes")
        memfd = packet.take_memfd()
        request.gathered.append((variable.name, packet.body if memfd is None else memfd, packet.size))

    def _send_variables(self, request: _Request, missing: list[str]) -> None:
        if sum(len(name) for name, _, _ in request.gathered) > _MAX_NAMES_CHARS:
            request.close()
            self._channel.fail(request.op, "value_refused", "too many variables for one request; name fewer")
            return
        listed: list[GotVariable] = []
        inline: list[bytes] = []
        total = 0
        for name, data, size in request.gathered:
            if isinstance(data, bytes) and total + size <= _INLINE_TOTAL_BYTES:
                listed.append(GotVariable(name=name, inline=size))
                inline.append(data)
                total += size
            else:
                blob_id = self._channel.send_blob(data, size, op=request.op)
                listed.append(GotVariable(name=name, blob=blob_id, size=size))
        names = dumps(GotVariables(variables=listed, missing=missing).head())
        self._channel.done(request.op, names + b"".join(inline), names=len(names))

    # -- the state of the session ----------------------------------------------------------------------------------

    def _restore_state(self, request: RestoreState) -> None:
        """Restores a state. Without a blob, answers whether this one was restored, or fails if none can be."""
        op = request.op
        if self._restored is not None and self._restored[0] == request.digest:
            self._channel.done(op, self._restored[1], restored=True)
        elif self._restored is not None or self._runner.has_run:
            why = "this one has restored another" if self._restored else "this one has executed code"
            self._channel.fail(op, "session_used", f"only a new session can restore a state, and {why}")
        elif request.blob is None:
            self._channel.done(op, restored=False)
        else:
            fd = self._transfers.take_blob(request.blob)
            if fd is None:
                self._channel.fail(op, "blob_not_found", "the bytes of the state did not arrive")
                return
            self._current = _Request(RestoreState, op)
            self._current.digest = request.digest
            self._child_processes.post(link_messages.RestoreState(), memfd=fd)

    def on_state(self, packet: link.Packet) -> None:
        """Keeps the exported state. Raises FrameError."""
        request = self._current
        if request is None or request.kind is not ExportState or request.gathered:
            raise FrameError("a state that was not asked for, or one too many")
        memfd = packet.take_memfd()
        if memfd is None:
            raise FrameError("a state without a memory file")
        request.gathered.append(("", memfd, packet.size))

    def _end_state(self, request: _Request, body: bytes) -> None:
        if request.kind is RestoreState:
            self._restored = request.digest, body
            self._channel.done(request.op, body, restored=True)
            return
        if not request.gathered:
            raise FrameError("a manifest without its state")
        ((_, data, size),) = request.gathered
        self._channel.send_blob(data, size, op=request.op)
        self._channel.done(request.op, body)

    # -- tools ---------------------------------------------------------------------------------------------------

    def post_tools(self) -> None:
        """Gives a new interpreter the tools that it need not make."""
        why_not = self._why_no_tools or "it has not been made again in this interpreter yet"
        self._tools.post_called(self._child_processes.post, why_not)

    def make_tools_again(self) -> None:
        self.tools_due = False
        self._current = _Request(RegisterTools, 0, self._tools, again=True)
        self._tools.post_all(self._child_processes.post, again=True)

    def forbid_tools(self, patterns: list[str]) -> None:
        """Drops the shipped tools that no pattern matches."""
        why_not = "the policy no longer allows it in the sandbox"
        names = self._tools.forbid(patterns, why_not)
        if names and self._child_processes.started:
            self._child_processes.post(DropTools(why_not=why_not), dumps(names))

    def give_up_tools(self) -> None:
        """Stops making shipped tools again: they killed an interpreter, and would kill the next one, too."""
        if self._tools.has_shipped:
            self._why_no_tools = "the interpreter died or hung while its tools were made again"
            self._results.notify(f"{self._why_no_tools}; they are no longer available\n")
            self.tools_due = False
            self.post_tools()

    def _register_tools(self, request: RegisterTools, body: bytes) -> None:
        op = request.op
        try:
            tools = ToolSet.read(request, body, self._transfers.take_blob)
        except PartMissing as missing:
            self._channel.fail(op, "blob_not_found", str(missing))
        except TooMuchShipped as problem:
            self._channel.fail(op, "too_large", str(problem))
        else:
            if tools.has_shipped:
                self._current = _Request(RegisterTools, op, tools)
                tools.post_all(self._child_processes.post, again=False)
            else:
                self._adopt(tools)
                self.post_tools()
                self._channel.done(op)

    def _adopt(self, tools: ToolSet) -> None:
        """Makes these the session's tools."""
        self._tools.close()
        self._tools = tools
        self._runner.tool_calls.tools, self._runner.tool_calls.final_tools = tools.called, tools.final
        self._why_no_tools = ""

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def max_answer_bytes(self) -> int:
        """Largest body of an answer to the current request; 0 without one."""
        if self._current is None:
            return 0
        return _MAX_MANIFEST_BYTES if self._current.kind in _OF_STATES else _MAX_NAMES_BYTES

    def on_answer(self, answer: Answered, body: bytes) -> None:
        """Ends the current request with the interpreter's answer. Raises FrameError."""
        if self._current is None:
            raise FrameError("an answer without a request")
        request, ok, message = self._current, answer.ok, answer.message
        if request.on_answer is not None:
            self._current = None  # first, since it may ask for more
            try:
                request.on_answer(answer, body)
            except FrameError:
                self._current = request  # the interpreter is killed for it, and `refuse_current` answers then
                raise
            return
        if ok and request.kind in _OF_STATES:
            self._end_state(request, body)
            self._current = None
            return
        names = read_texts(body or b"[]", VARIABLES_NAMED_MAX, MAX_NAME_CHARS, "names")
        self._current = None
        if request.tools is not None:
            self._end_tools(request, request.tools, ok=ok, message=message, missing=names)
        elif not ok:
            request.close()
            reason = "state_refused" if request.kind in _OF_STATES else "value_refused"
            self._channel.fail(request.op, reason, message)
        elif request.kind is FindModules:
            self._channel.done(request.op, dumps(names))
        elif request.kind is SetVariables:
            request.close()
            self._channel.done(request.op)
        else:
            self._send_variables(request, names)

    def _end_tools(self, request: _Request, tools: ToolSet, *, ok: bool, message: str, missing: list[str]) -> None:
        if request.again:
            if message:
                self._results.notify(f"tools could not be made again in the new interpreter: {message}\n")
        elif ok:
            self._adopt(tools)
            self._channel.done(request.op)
        else:
            request.close()
            modules = dumps(missing[:MAX_MISSING_MODULES]) if missing else b""
            self._channel.fail(request.op, "modules_missing" if missing else "tool_refused", message, modules)

    def on_interpreter_replaced(self) -> None:
        """Refuses the current request: its interpreter is dead, and another one was started."""
        self.refuse_current()
        self.tools_due = self._tools.has_shipped and not self._why_no_tools

    def refuse_current(self) -> None:
        """Refuses the current request, whose process is dead."""
        request, self._current = self._current, None
        if request is not None:
            request.close()
            if request.on_answer is not None:
                request.on_answer(Answered(ok=False, message="the interpreter died or hung over it"), b"")
            elif request.again:
                self.give_up_tools()
            elif request.tools is not None:
                message = "the interpreter died or hung while these tools were made"
                self._channel.fail(request.op, "tool_refused", message)
            else:
                message = "the interpreter died or hung over these values"
                reason = "state_refused" if request.kind in _OF_STATES else "value_refused"
                self._channel.fail(request.op, reason, message)


def _listed_variables(request: SetVariables, body: bytes) -> list[SetVariable]:
    """Reads the list of variables to set. Raises FrameError."""
    if request.listed > len(body):
        raise FrameError(f"a list of {request.listed} bytes in a body of {len(body)}")
    listed = read_listed(SetVariable, body[: request.listed], VARIABLES_NAMED_MAX, "variables")
    if any(variable.blob is None and variable.inline is None for variable in listed):
        raise FrameError("a variable without a value")
    return listed
