"""What the interpreter is asked for between two programs: variables, tools, and the state of the session.

One operation at a time. The interpreter answers it, or dies or hangs over it: then it is refused, and the supervisor
replaces the interpreter. Tools that run in the interpreter are made again in the next one, when the prelude has run; a
tool that ended one interpreter is not tried in another.
"""

from __future__ import annotations

import os
import time

from executor_api.limits import VARIABLES_BYTES_MAX, VARIABLES_MAX, VARIABLES_NAMED_MAX

from . import link
from .channel import Channel
from .crew import Crew
from .frames import CHUNK_BYTES, MAX_MISSING_MODULES, Fields, FrameError, Kind
from .lean import dumps, loads
from .runner import Runner
from .tool_set import PartMissing, ToolSet, TooMuchShipped, listed_tools, places
from .transfers import Transfers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

OPERATION_TIME_S = 60.0
_MAX_NAME_CHARS = 256
_MAX_MESSAGE_CHARS = 4000
_INLINE_TOTAL_BYTES = 512 * 1024
# Of variables got at one time: a name takes up to 12 bytes for a character in the frame that lists them.
_MAX_NAMES_CHARS = 128 * 1024
_OF_STATES = (Kind.EXPORT_STATE, Kind.RESTORE_STATE)
_DIGEST_CHARS = 64
# Of what a state holds and what it could not hold.
_MAX_MANIFEST_BYTES = 4 * 1024 * 1024
# Bytes of the names in an answer, as JSON.
_MAX_NAMES_BYTES = VARIABLES_NAMED_MAX * (12 * _MAX_NAME_CHARS + 3) + 2


class _Operation:
    """`tools` are those that are made; `again`: nobody waits for that, it is a new interpreter that needs them."""

    def __init__(self, kind: int, op: int, tools: Optional[ToolSet] = None, *, again: bool = False) -> None:
        self.kind = kind
        self.op = op
        self.tools = tools
        self.again = again
        self.deadline = time.monotonic() + OPERATION_TIME_S
        self.gathered: list[tuple[str, Union[bytes, int], int]] = []
        self.digest = ""  # of the state that is restored

    def close(self) -> None:
        for _, data, _ in self.gathered:
            if isinstance(data, int):
                os.close(data)
        self.gathered = []
        if self.tools is not None and not self.again:
            self.tools.close()


class Operations:
    """The current operation, if any, and the session's tools. `notify` takes what the next result is to say."""

    def __init__(
        self, channel: Channel, crew: Crew, transfers: Transfers, runner: Runner, notify: Callable[[str], None]
    ) -> None:
        self._channel = channel
        self._crew = crew
        self._transfers = transfers
        self._runner = runner
        self._notify = notify
        self._current: Optional[_Operation] = None
        self._tools = ToolSet()
        self._why_no_tools = ""  # those that were shipped are not made again: an interpreter ended over it
        self.tools_due = False  # they have to be, in a new interpreter
        self._restored: Optional[tuple[str, bytes]] = None  # the state that was, by its digest, and what came of it

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def due(self) -> float:
        """When the interpreter is taking too long."""
        return float("inf") if self._current is None else self._current.deadline

    def postpone(self) -> None:
        """It waits for the daemon, and not for the interpreter."""
        if self._current is not None:
            self._current.deadline = time.monotonic() + OPERATION_TIME_S

    def close_all(self) -> None:
        """In a forked child that must not have them."""
        if self._current is not None:
            self._current.close()
        self._tools.close()

    def claim_blobs(self, kind: int, head: Fields, body: bytes) -> None:
        """What a job names that waits for its turn must not expire meanwhile."""
        brought: list[Fields] = []
        if kind == Kind.SET_VARIABLES:
            brought = _listed_variables(head, body)
        elif kind == Kind.REGISTER_TOOLS:
            brought = [place for tool in listed_tools(head, body) for _, place in places(tool)]
        elif kind == Kind.RESTORE_STATE:
            brought = [head]
        for place in brought:
            if "blob" in place:
                self._transfers.claim_blob(place.text("blob", 64))

    def begin(self, kind: int, head: Fields, body: bytes) -> None:
        """Begins what the daemon asks for; some of it is done at once."""
        op = head.integer("op")
        if kind == Kind.SET_VARIABLES:
            self._set_variables(op, head, body)
        elif kind == Kind.REGISTER_TOOLS:
            self._register_tools(op, head, body)
        elif kind == Kind.EXPORT_STATE:
            self._current = _Operation(kind, op)
            self._crew.post({"t": "export", "max_bytes": head.integer("max_bytes")})
        elif kind == Kind.RESTORE_STATE:
            self._restore_state(op, head)
        else:
            self._current = _Operation(kind, op)
            self._crew.post({"t": "find" if kind == Kind.FIND_MODULES else "get"}, body)

    # -- variables -----------------------------------------------------------------------------------------------

    def _set_variables(self, op: int, head: Fields, body: bytes) -> None:
        position = head.integer("listed", 0, len(body))
        for item in _listed_variables(head, body):
            name = item.text("name", _MAX_NAME_CHARS)
            if "blob" in item:
                fd = self._transfers.take_blob(item.text("blob", 64))
                if fd is None:
                    self._crew.post({"t": "forget"})
                    self._channel.fail(op, "blob_not_found", f"the bytes of variable {name} are not there")
                    return
                self._crew.post({"t": "variable", "name": name}, memfd=fd)
            else:
                size = item.integer("inline", 0, CHUNK_BYTES)
                self._crew.post({"t": "variable", "name": name}, body[position : position + size])
                position += size
        self._current = _Operation(Kind.SET_VARIABLES, op)
        self._crew.post({"t": "commit"})

    def on_variable(self, message: link.Message) -> None:
        """A variable that was asked for. Raises FrameError."""
        name, operation = message.head.text("name", _MAX_NAME_CHARS), self._current
        # The interpreter counts them, too, and says so; one that does not is not what it was.
        if operation is None or operation.kind != Kind.GET_VARIABLES or len(operation.gathered) >= VARIABLES_MAX:
            raise FrameError("a variable that nobody asked for, or one too many")
        if sum(size for _, _, size in operation.gathered) + message.size > VARIABLES_BYTES_MAX:
            raise FrameError("variables of too many bytes")
        memfd = message.take_memfd()
        operation.gathered.append((name, message.body if memfd is None else memfd, message.size))

    def _send_variables(self, operation: _Operation, missing: list[str]) -> None:
        if sum(len(name) for name, _, _ in operation.gathered) > _MAX_NAMES_CHARS:
            operation.close()
            self._channel.fail(operation.op, "value_refused", "too many variables to be got at once; name fewer")
            return
        listed: list[dict[str, Any]] = []
        inline: list[bytes] = []
        total = 0
        for name, data, size in operation.gathered:
            if isinstance(data, bytes) and total + size <= _INLINE_TOTAL_BYTES:
                listed.append({"name": name, "inline": size})
                inline.append(data)
                total += size
            else:
                blob_id = self._channel.send_blob({"op": operation.op}, data, size)
                listed.append({"name": name, "blob": blob_id, "size": size})
        names = dumps({"variables": listed, "missing": missing})
        self._channel.done(operation.op, names + b"".join(inline), names=len(names))

    # -- the state of the session ----------------------------------------------------------------------------------

    def _restore_state(self, op: int, head: Fields) -> None:
        """Without a blob, it is asked whether a state may still be restored, or this one has been."""
        digest = head.text("digest", _DIGEST_CHARS)
        if self._restored is not None and self._restored[0] == digest:
            self._channel.done(op, self._restored[1], restored=True)
        elif self._restored is not None or self._runner.has_run:
            why = "another state has been restored in it" if self._restored else "code has been executed in it"
            self._channel.fail(op, "session_used", f"a state is restored in a session that is new, and {why}")
        elif "blob" not in head:
            self._channel.done(op, restored=False)
        else:
            fd = self._transfers.take_blob(head.text("blob", 64))
            if fd is None:
                self._channel.fail(op, "blob_not_found", "the bytes of the state are not there")
                return
            self._current = _Operation(Kind.RESTORE_STATE, op)
            self._current.digest = digest
            self._crew.post({"t": "restore"}, memfd=fd)

    def on_state(self, message: link.Message) -> None:
        """The variables that were asked for, written down. Raises FrameError."""
        operation = self._current
        if operation is None or operation.kind != Kind.EXPORT_STATE or operation.gathered:
            raise FrameError("a state that nobody asked for, or one more")
        memfd = message.take_memfd()
        if memfd is None:
            raise FrameError("a state that is no memory file")
        operation.gathered.append(("", memfd, message.size))

    def _end_state(self, operation: _Operation, body: bytes) -> None:
        if operation.kind == Kind.RESTORE_STATE:
            self._restored = operation.digest, body
            self._channel.done(operation.op, body, restored=True)
            return
        if not operation.gathered:
            raise FrameError("a manifest of a state that did not come")
        ((_, data, size),) = operation.gathered
        self._channel.send_blob({"op": operation.op}, data, size)
        self._channel.done(operation.op, body)

    # -- tools ---------------------------------------------------------------------------------------------------

    def post_tools(self) -> None:
        """Gives a new interpreter what it can have of the tools at once."""
        why_not = self._why_no_tools or "it is to be made again in this interpreter, and is not yet"
        self._tools.post_called(self._crew.post, why_not)

    def make_tools_again(self) -> None:
        self.tools_due = False
        self._current = _Operation(Kind.REGISTER_TOOLS, 0, self._tools, again=True)
        self._tools.post_all(self._crew.post, again=True)

    def forbid_tools(self, patterns: list[str]) -> None:
        """Of the tools that were shipped, only those of such names may stay."""
        names = self._tools.forbid(patterns, "the policy does not allow it in the sandbox any more")
        if names and self._crew.started:
            self._crew.post({"t": "drop"}, dumps(names))

    def give_up_tools(self) -> None:
        """Making them again has ended an interpreter, and would end the next one too."""
        if self._tools.has_shipped:
            self._why_no_tools = "the interpreter died or hung when tools were made again in it"
            self._notify(f"{self._why_no_tools}; none of them is there any more\n")
            self.tools_due = False
            self.post_tools()

    def _register_tools(self, op: int, head: Fields, body: bytes) -> None:
        try:
            tools = ToolSet.read(head, body, self._transfers.take_blob)
        except PartMissing as missing:
            self._channel.fail(op, "blob_not_found", str(missing))
        except TooMuchShipped as problem:
            self._channel.fail(op, "too_large", str(problem))
        else:
            if tools.has_shipped:
                self._current = _Operation(Kind.REGISTER_TOOLS, op, tools)
                tools.post_all(self._crew.post, again=False)
            else:
                self._adopt(tools)
                self.post_tools()
                self._channel.done(op)

    def _adopt(self, tools: ToolSet) -> None:
        """These are the session's tools from here on."""
        self._tools.close()
        self._tools = tools
        self._runner.tools, self._runner.final_tools = tools.called, tools.final
        self._why_no_tools = ""

    # -- the end -------------------------------------------------------------------------------------------------

    @property
    def max_answer_bytes(self) -> int:
        """How long the body of an answer may be: to be asked before it is read, since nobody may have asked for one."""
        if self._current is None:
            return 0
        return _MAX_MANIFEST_BYTES if self._current.kind in _OF_STATES else _MAX_NAMES_BYTES

    def on_done(self, head: Fields, body: bytes) -> None:
        """The interpreter has done it, or can't. Raises FrameError."""
        if self._current is None:
            raise FrameError("the end of an operation that nobody asked for")
        # All of it is read before anything is done: whoever waits must not be forgotten over an answer that is wrong.
        operation, ok = self._current, head.boolean("ok")
        message = head.text("message", _MAX_MESSAGE_CHARS, default="")
        if ok and operation.kind in _OF_STATES:
            self._end_state(operation, body)
            self._current = None
            return
        names = Fields({"names": loads(body or b"[]")}).texts("names", VARIABLES_NAMED_MAX, _MAX_NAME_CHARS)
        self._current = None
        if operation.tools is not None:
            self._end_tools(operation, operation.tools, ok=ok, message=message, missing=names)
        elif not ok:
            operation.close()
            reason = "state_refused" if operation.kind in _OF_STATES else "value_refused"
            self._channel.fail(operation.op, reason, message)
        elif operation.kind == Kind.FIND_MODULES:
            self._channel.done(operation.op, dumps(names))
        elif operation.kind == Kind.SET_VARIABLES:
            operation.close()
            self._channel.done(operation.op)
        else:
            self._send_variables(operation, names)

    def _end_tools(self, operation: _Operation, tools: ToolSet, *, ok: bool, message: str, missing: list[str]) -> None:
        if operation.again:
            if message:
                self._notify(f"tools could not be made again in the new interpreter: {message}\n")
        elif ok:
            self._adopt(tools)
            self._channel.done(operation.op)
        else:
            operation.close()
            modules = dumps(missing[:MAX_MISSING_MODULES]) if missing else b""
            self._channel.fail(operation.op, "modules_missing" if missing else "tool_refused", message, modules)

    def on_interpreter_gone(self) -> None:
        """The interpreter is dead, and another one there: refuses what was asked of the last."""
        operation, self._current = self._current, None
        if operation is not None:
            operation.close()
            if operation.again:
                self.give_up_tools()
            elif operation.tools is not None:
                message = "the interpreter died or hung while these tools were made"
                self._channel.fail(operation.op, "tool_refused", message)
            else:
                message = "the interpreter died or hung over these values"
                reason = "state_refused" if operation.kind in _OF_STATES else "value_refused"
                self._channel.fail(operation.op, reason, message)
        self.tools_due = self._tools.has_shipped and not self._why_no_tools


def _listed_variables(head: Fields, body: bytes) -> list[Fields]:
    """What SET_VARIABLES sets: names, and where each value is."""
    listed = loads(body[: head.integer("listed", 0, len(body))])
    return Fields({"variables": listed}).objects("variables", VARIABLES_NAMED_MAX)
