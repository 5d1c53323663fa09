"""The supervisor: pid 1 of the sandbox, between the daemon and the interpreter.

Theory of operation. One thread, one epoll loop, nothing in it blocks. The daemon sends jobs (configure, execute,
register tools, set and get variables); they are done one after the other, in order of arrival. File operations and
blobs are served at any time, by the supervisor itself. For an execution the checker parses, checks and instruments the
source (a child, so that a parser bomb costs no more than one execution), then the interpreter runs the code object.

The supervisor never runs agent code, never parses it and never unpickles or unmarshals anything. It must never hold the
daemon's token, a host path, or another session's anything: a forked child inherits its memory.

The interpreter is replaced when it died or had to be killed: everything in the sandbox is killed with it, `generation`
rises, tools and prelude are put in place again, and the next result says that variables were reset.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import socket
import time
from collections import deque
from typing import Any, Callable, NamedTuple, Optional, Union

from . import link, usage, workspace
from .channel import Channel, FileSlice
from .children import Child, ChildStuck, describe_exit, kill_everything, reap, spawn
from .frames import CHUNK_BYTES, PROTOCOL_VERSION, Fields, Frame, FrameError, Kind
from .output import StreamDecoder
from .run import GRACE_S, MAX_TOOL_CALLS, Phase, Pipe, Run, Settings, error

MAX_JOBS = 64
MAX_TOOLS = 256
MAX_BLOBS = 64
MAX_TRANSFERS = 16
# Everything staged at one time, and one value on its way out.
MAX_BLOB_BYTES = 256 * 1024 * 1024
MAX_IMAGES_PER_RUN = 64
# For setting or getting variables, and for starting an interpreter.
OPERATION_TIME_S = 60.0
_WATCH_INTERVAL_S = 0.1
_COALESCE_S = 0.005
_MAX_BOOT_FAILURES = 3
_CHECKER_USES = 200
# At most 4 bytes each in UTF-8, so a piece is never larger than a chunk.
_LOG_CHARS = CHUNK_BYTES // 4
_INLINE_TOTAL_BYTES = 1024 * 1024
_PRELUDE = Settings("trailing_expression", 60.0, 60.0, 10**9, 64 * 1024)


class Config(NamedTuple):
    """How the backend starts a guest: the one argument on its command line."""

    token_sha256: str
    workspace: str
    orphan_time_s: float
    memory_bytes: int
    processes: int
    watch_memory: bool
    mark: str  # random: what the checker leaves in code objects for the interpreter to replace


class _Blob:
    def __init__(self, size: int) -> None:
        self.fd = os.memfd_create("blob", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.size = size
        self.received = 0


class _Job(NamedTuple):
    kind: int
    head: Fields
    body: bytes
    arrived: float


class Supervisor:
    """Owns the channel, the children and the current job."""

    def __init__(
        self,
        config: Config,
        listener: socket.socket,
        interpreter_main: Callable[[socket.socket, Config], None],
        checker_main: Callable[[socket.socket, Config], None],
    ) -> None:
        self._config = config
        self._interpreter_main = interpreter_main
        self._checker_main = checker_main
        self._poll = select.epoll()
        self._handlers: dict[int, tuple[int, Callable[[int], None]]] = {}
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._interpreter: Optional[Child] = None
        self._checker: Optional[Child] = None
        self._checker_uses = 0
        self.generation = 1
        self._boot_failures = 0
        self._variables_reset = False
        self._authorized: list[str] = []
        self._prelude = ""
        self._tools: list[dict[str, Any]] = []
        self._notices: list[str] = []
        self._jobs: deque[_Job] = deque()
        self._run: Optional[Run] = None
        self._run_count = 0
        self._operation: Optional[_Job] = None
        self._operation_deadline = 0.0
        self._gathered: list[tuple[str, Union[bytes, int], int]] = []
        self._configuring: Optional[int] = None
        self._blobs: dict[str, _Blob] = {}
        self._uploads: dict[int, workspace.Upload] = {}
        self._downloads: dict[int, workspace.Download] = {}
        self._serial = 0
        self._decoder = StreamDecoder()
        self._pending_log: list[tuple[str, bytes]] = []
        self._log_due: Optional[float] = None
        self._last_log = 0.0
        self._next_watch = 0.0
        self._children_paused = False
        self._images = 0
        self._stop = False
        self._channel = Channel(listener, config.token_sha256, self._watch, self._on_frame, self._describe)

    # -- the loop ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Runs until the daemon says SHUTDOWN, nobody has been the daemon for `orphan_time_s`, or nothing works."""
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._watch(self._wakeup_read, select.EPOLLIN, self._on_wakeup)
        self._start_children()
        while not self._stop:
            for fd, events in self._poll.poll(self._poll_time_s()):
                entry = self._handlers.get(fd)
                if entry is not None:
                    entry[1](events)
            self._on_time()
            self._pump_downloads()
            self._set_children_paused(self._channel.full)
        kill_everything()

    def _watch(self, fd: int, events: int, handler: Optional[Callable[[int], None]]) -> None:
        known = self._handlers.get(fd)
        if handler is None:
            if known is not None:
                del self._handlers[fd]
                self._poll.unregister(fd)
        elif known is None:
            self._handlers[fd] = (events, handler)
            self._poll.register(fd, events)
        elif known != (events, handler):
            self._handlers[fd] = (events, handler)
            if known[0] != events:
                self._poll.modify(fd, events)

    def _poll_time_s(self) -> float:
        """Until the next deadline; -1 is for ever, which never happens: the orphan time is always one."""
        now = time.monotonic()
        due = [self._channel.last_heard + self._config.orphan_time_s]
        if self._log_due is not None:
            due.append(self._log_due)
        if self._operation is not None:
            due.append(self._operation_deadline)
        run = self._run
        if run is not None:
            if run.phase == Phase.CHECKING:
                due.append(run.check_deadline)
            else:
                due.append(self._next_watch)
            due.append(run.wall_deadline if run.kill_deadline is None else run.kill_deadline)
        return max(0.0, min(60.0, min(due) - now))

    def _on_wakeup(self, _events: int) -> None:
        try:
            os.read(self._wakeup_read, 4096)
        except BlockingIOError:
            pass
        for pid, status in reap():
            if self._interpreter is not None and pid == self._interpreter.pid:
                self._on_interpreter_exit(status)
            elif self._checker is not None and pid == self._checker.pid:
                self._on_checker_exit(status)

    def _on_time(self) -> None:
        now = time.monotonic()
        self._channel.expire_strangers()
        if not self._channel.connected and now >= self._channel.last_heard + self._config.orphan_time_s:
            self._stop = True
            return
        if self._channel.connected and now >= self._channel.last_heard + self._config.orphan_time_s:
            self._stop = True  # connected, and silent for all that time: the daemon pings far more often
            return
        if self._log_due is not None and now >= self._log_due:
            self._flush_log()
        if self._operation is not None and now >= self._operation_deadline:
            self._replace_interpreter("the operation took too long")
        run = self._run
        if run is not None:
            self._check_deadlines(run, now)

    def _check_deadlines(self, run: Run, now: float) -> None:
        if run.phase == Phase.CHECKING:
            if now >= min(run.check_deadline, run.wall_deadline):
                self._kill_checker()
                self._finish_refused(run, error("SyntaxError", "the source takes too long to parse", line=1))
            return
        if run.kill_deadline is not None and now >= run.kill_deadline:
            self._replace_interpreter("killed")
            return
        if run.ended_by is None:
            if now >= run.wall_deadline:
                self._interrupt(run, "timeout")
            elif now >= self._next_watch:
                self._next_watch = now + _WATCH_INTERVAL_S
                self._watch_usage(run)

    def _watch_usage(self, run: Run) -> None:
        if self._cpu_time_s(run) > run.settings.cpu_time_s:
            self._interrupt(run, "cpu_limit")
        elif self._config.watch_memory and usage.sandbox_memory_bytes() > self._config.memory_bytes:
            run.ended_by = "out_of_memory"
            self._replace_interpreter("out of memory")

    def _cpu_time_s(self, run: Run) -> float:
        """CPU time of the run: exact for the interpreter, in clock ticks for its children."""
        if self._interpreter is None:
            return 0.0
        own = usage.process_cpu_s(self._interpreter.pid) - run.interpreter_cpu_before_s
        everything = usage.sandbox_cpu_s() - run.cpu_before_s
        return max(own, everything, 0.0)

    # -- frames of the daemon ------------------------------------------------------------------------------------

    def _describe(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL_VERSION,
            "python": platform.python_version(),
            "generation": self.generation,
        }

    def _on_frame(self, frame: Frame) -> None:
        kind, head = frame.kind, frame.head
        if kind == Kind.TOOL_RESULT:
            self._on_tool_result(head, frame.body)
        elif kind == Kind.CANCEL:
            self._on_cancel(head.text("id", 64))
        elif kind == Kind.BLOB_BEGIN:
            self._on_blob_begin(head)
        elif kind == Kind.BLOB_DATA:
            self._on_blob_data(head, frame.body)
        elif kind == Kind.FILE_DATA:
            self._on_file_data(head, frame.body)
        elif kind in (Kind.FILE_PUT, Kind.FILE_GET, Kind.FILE_LIST):
            self._on_file(kind, head)
        elif kind == Kind.SHUTDOWN:
            self._stop = True
        elif kind in (Kind.CONFIGURE, Kind.EXECUTE, Kind.REGISTER_TOOLS, Kind.SET_VARIABLES, Kind.GET_VARIABLES):
            if len(self._jobs) >= MAX_JOBS:
                raise FrameError("too many jobs wait")
            self._jobs.append(_Job(kind, head, frame.body, time.monotonic()))
            self._next_job()
        else:
            raise FrameError(f"frame kind {kind} is not for a guest")

    def _next_job(self) -> None:
        while self._jobs and self._run is None and self._operation is None and not self._stop:
            job = self._jobs.popleft()
            if job.kind == Kind.EXECUTE:
                self._begin_execution(job)
            elif job.kind == Kind.CONFIGURE:
                self._configure(job)
            elif job.kind == Kind.REGISTER_TOOLS:
                self._register_tools(job)
            elif job.kind == Kind.SET_VARIABLES:
                self._set_variables(job)
            else:
                self._get_variables(job)

    def _done(self, op: int, body: bytes = b"", **more: Any) -> None:
        self._channel.send(Kind.DONE, {"op": op, "ok": True, **more}, body)

    def _failed(self, op: int, reason: str, message: str) -> None:
        self._channel.send(Kind.DONE, {"op": op, "ok": False, "reason": reason, "message": message[:4000]})

    # -- jobs ----------------------------------------------------------------------------------------------------

    def _configure(self, job: _Job) -> None:
        op = job.head.integer("op")
        self._authorized = job.head.texts("authorized_imports", 2048, 256)
        self._prelude = job.body.decode("utf-8", "replace")
        self._post_settings()
        if self._prelude:
            self._configuring = op
            self._begin_run("", self._prelude, _PRELUDE)
        else:
            self._done(op)

    def _register_tools(self, job: _Job) -> None:
        tools = json.loads(job.body)
        if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
            raise FrameError("tools are not a list")
        self._tools = tools
        self._post_to_interpreter({"t": "tools"}, job.body)
        self._done(job.head.integer("op"))

    def _set_variables(self, job: _Job) -> None:
        op = job.head.integer("op")
        position = 0
        for item in job.head.objects("variables", 1024):
            name = item.text("name", 256)
            if "blob" in item:
                blob = self._take_blob(item.text("blob", 64))
                if blob is None:
                    self._post_to_interpreter({"t": "forget"})
                    self._failed(op, "blob_not_found", f"the bytes of variable {name} are not there")
                    return
                self._post_to_interpreter({"t": "variable", "name": name}, memfd=blob.fd)
            else:
                size = item.integer("inline", 0, CHUNK_BYTES)
                self._post_to_interpreter({"t": "variable", "name": name}, job.body[position : position + size])
                position += size
        self._begin_operation(job, {"t": "commit"})

    def _get_variables(self, job: _Job) -> None:
        self._begin_operation(job, {"t": "get"}, json.dumps(job.head.texts("names", 1024, 256)).encode())

    def _begin_operation(self, job: _Job, message: dict[str, Any], body: bytes = b"") -> None:
        self._operation = job
        self._operation_deadline = time.monotonic() + OPERATION_TIME_S
        self._post_to_interpreter(message, body)

    def _end_operation(self, head: Fields, body: bytes) -> None:
        job = self._operation
        if job is None:
            return
        self._operation = None
        op = job.head.integer("op")
        gathered, self._gathered = self._gathered, []
        if not head.boolean("ok"):
            _close_gathered(gathered)
            self._failed(op, "value_refused", head.text("message", 4000))
        elif job.kind == Kind.SET_VARIABLES:
            self._done(op)
        else:
            self._send_variables(op, gathered, body)
        self._next_job()

    def _send_variables(self, op: int, gathered: list[tuple[str, Union[bytes, int], int]], missing: bytes) -> None:
        listed: list[dict[str, Any]] = []
        inline: list[bytes] = []
        total = 0
        for name, data, size in gathered:
            if isinstance(data, bytes) and total + size <= _INLINE_TOTAL_BYTES:
                listed.append({"name": name, "inline": size})
                inline.append(data)
                total += size
            else:
                blob_id = self._send_blob({"op": op}, data, size)
                listed.append({"name": name, "blob": blob_id, "size": size})
        names = json.dumps({"variables": listed, "missing": json.loads(missing or b"[]")}).encode()
        self._done(op, names + b"".join(inline), names=len(names))

    def _send_blob(self, head: dict[str, Any], data: Union[bytes, int], size: int) -> str:
        """Sends a payload in chunks, ahead of the frame that will name it. Takes over a memory file."""
        self._serial += 1
        blob_id = f"g{self._serial}"
        fd = link.sealed_memfd([data]) if isinstance(data, bytes) else data
        self._channel.send_memfd(Kind.BLOB_CHUNK, {**head, "blob": blob_id}, fd, size)
        return blob_id

    # -- executions ----------------------------------------------------------------------------------------------

    def _begin_execution(self, job: _Job) -> None:
        settings = Settings.read(job.head)
        self._begin_run(job.head.text("id", 64), job.body.decode("utf-8", "replace"), settings)

    def _begin_run(self, execution_id: str, source: str, settings: Settings) -> None:
        if execution_id:
            self._run_count += 1
        self._images = 0
        self._run = Run(execution_id, source, settings, self._run_count)
        self._post_to_checker(self._run)

    def _post_to_checker(self, run: Run) -> None:
        if self._checker is None:
            self._start_checker()
        assert self._checker is not None
        self._checker_uses += 1
        head = {"filename": run.filename, "mode": run.settings.mode, "authorized": self._authorized}
        body = json.dumps(head).encode()
        self._checker.post({"t": "check", "head": len(body)}, body + run.source.encode("utf-8", "surrogatepass"))

    def _on_checker(self, _events: int) -> None:
        checker = self._checker
        assert checker is not None
        try:
            checker.flush()
            message = link.receive(checker.sock, MAX_BLOB_BYTES)
        except BlockingIOError:
            return
        except (link.LinkClosed, FrameError):
            self._watch(checker.sock.fileno(), 0, None)
            self._kill_checker_process()
            return  # its exit is reported where children are reaped
        for fd in message.fds:
            os.close(fd)
        run = self._run
        if run is None or run.phase != Phase.CHECKING:
            if message.memfd is not None:
                os.close(message.memfd)
            return
        if message.head.boolean("ok"):
            self._run_code(run, message)
        else:
            body = message.body if message.memfd is None else link.read_memfd(message.memfd, message.size)
            verdict = json.loads(body)
            self._finish_refused(run, verdict["error"], verdict["outcome"])
        if self._checker_uses >= _CHECKER_USES:
            self._kill_checker()

    def _run_code(self, run: Run, message: link.Message) -> None:
        """Hands the checked code to the interpreter, with fresh pipes as its stdout and stderr."""
        interpreter = self._interpreter
        if interpreter is None:
            return
        run.phase = Phase.RUNNING
        run.pipes = [Pipe("stdout"), Pipe("stderr")]
        run.interpreter_cpu_before_s = usage.process_cpu_s(interpreter.pid)
        run.cpu_before_s = usage.sandbox_cpu_s()
        self._next_watch = time.monotonic() + _WATCH_INTERVAL_S
        for pipe in run.pipes:
            if not self._children_paused:
                self._watch(pipe.read_fd, select.EPOLLIN, lambda _events, pipe=pipe: self._on_pipe(pipe))
        code = message.body if message.memfd is None else link.read_memfd(message.memfd, message.size)
        head = {
            "t": "run",
            "filename": run.filename,
            "operations": run.settings.operations,
            "source": len(source := run.source.encode("utf-8", "surrogatepass")),
        }
        fds = tuple(pipe.write_fd for pipe in run.pipes)
        self._post_to_interpreter(head, source + code, fds=fds)

    def _on_cancel(self, execution_id: str) -> None:
        run = self._run
        if run is not None and run.execution_id == execution_id:
            if run.phase == Phase.CHECKING:
                self._kill_checker()
                run.ended_by = "cancelled"
                self._finish(run, "cancelled", None)
            elif run.ended_by is None:
                self._interrupt(run, "cancelled")
            return
        for job in self._jobs:
            if job.kind == Kind.EXECUTE and job.head.values.get("id") == execution_id:
                self._jobs.remove(job)
                run = Run(execution_id, "", Settings.read(job.head), self._run_count)
                self._finish(run, "cancelled", None)
                return

    def _interrupt(self, run: Run, outcome: str) -> None:
        """Asks the interpreter to stop; the kill follows if it has not within the grace."""
        run.phase = Phase.INTERRUPTED
        run.ended_by = outcome
        run.kill_deadline = time.monotonic() + GRACE_S
        if self._interpreter is not None:
            os.kill(self._interpreter.pid, signal.SIGINT)

    def _on_pipe(self, pipe: Pipe) -> None:
        """Takes at most a few pieces, so that a program that prints without end cannot starve the rest."""
        run = self._run
        if run is None:
            return
        for _ in range(8):
            data = pipe.read()
            if not data:
                if data is None:
                    self._watch(pipe.read_fd, 0, None)
                return
            self._on_output(run, pipe.stream, data)

    def _on_output(self, run: Run, stream: str, data: bytes) -> None:
        now = run.cutter.feed(stream, data)
        if now and run.visible:
            self._pending_log.append((stream, now))
            if self._log_due is None:
                self._log_due = max(time.monotonic(), self._last_log + _COALESCE_S)
        if run.cutter.flooded and run.ended_by is None:
            self._interrupt(run, "output_limit")

    def _drain_pipes(self, run: Run) -> None:
        """All that was written before the message at hand: what the order of events is made of."""
        budget = 64  # pieces: a background process that prints without end must not hold up the result
        for pipe in run.pipes:
            while budget:
                data = pipe.read()
                if not data:
                    break
                budget -= 1
                self._on_output(run, pipe.stream, data)
        self._flush_log()

    def _flush_log(self) -> None:
        """Sends the pending output, neighbours of one stream joined."""
        self._log_due = None
        run = self._run
        pending, self._pending_log = self._pending_log, []
        if run is None or not pending:
            return
        self._last_log = time.monotonic()
        start = 0
        for index in range(1, len(pending) + 1):
            if index == len(pending) or pending[index][0] != pending[start][0]:
                stream = pending[start][0]
                self._send_log(run, stream, self._decoder.decode(stream, b"".join(d for _, d in pending[start:index])))
                start = index

    def _send_log(self, run: Run, stream: str, text: str) -> None:
        for start in range(0, len(text), _LOG_CHARS):
            data = text[start : start + _LOG_CHARS].encode()
            self._channel.send(Kind.LOG, {"id": run.execution_id, "stream": stream}, data)

    # -- messages of the interpreter -----------------------------------------------------------------------------

    def _on_interpreter(self, events: int) -> None:
        interpreter = self._interpreter
        assert interpreter is not None
        try:
            if events & select.EPOLLOUT:
                interpreter.flush()
                self._rewatch_interpreter()
            message = link.receive(interpreter.sock, MAX_BLOB_BYTES)
        except BlockingIOError:
            return
        except (link.LinkClosed, FrameError):
            # Closed by agent code, or abused by it: nothing more can be learned from this interpreter.
            self._watch(interpreter.sock.fileno(), 0, None)
            os.kill(interpreter.pid, signal.SIGKILL)
            return
        try:
            self._on_message(message)
        except (FrameError, ValueError, KeyError, TypeError):
            os.kill(interpreter.pid, signal.SIGKILL)

    def _on_message(self, message: link.Message) -> None:
        for fd in message.fds:
            os.close(fd)
        kind = message.head.text("t", 32)
        run = self._run
        if kind == "variable" and self._operation is not None:
            data: Union[bytes, int] = message.body if message.memfd is None else message.memfd
            self._gathered.append((message.head.text("name", 256), data, message.size))
            return
        if kind == "output" and run is not None and run.output is None:
            run.output = message.body if message.memfd is None else message.memfd
            run.output_size = message.size
            return
        if kind == "image" and run is not None and run.visible and self._images < MAX_IMAGES_PER_RUN:
            self._images += 1
            self._drain_pipes(run)
            head = {"id": run.execution_id, "mime": message.head.text("mime", 64), "source": message.head.text("source", 32)}
            self._send_payload(Kind.IMAGE, head, message.body if message.memfd is None else message.memfd, message.size)
            return
        if kind == "tool_call" and run is not None:
            self._on_tool_call(run, message)
            return
        body = message.body if message.memfd is None else link.read_memfd(message.memfd, message.size)
        if kind == "booted":
            self._boot_failures = 0
        elif kind == "op_done":
            self._end_operation(message.head, body)
        elif kind == "done" and run is not None and run.phase != Phase.CHECKING:
            self._on_done(run, message.head, body)
        elif kind == "tool_call":
            self._refuse_call(message.head.text("call", 64), "no execution is running any more")

    def _send_payload(self, kind: int, head: dict[str, Any], data: Union[bytes, int], size: int) -> None:
        """Sends a frame whose payload is its body, or a blob sent ahead of it. Takes over a memory file."""
        if isinstance(data, bytes):
            self._channel.send(kind, head, data)
        elif size <= CHUNK_BYTES:
            self._channel.send(kind, head, FileSlice(data, 0, size, last=True))
        else:
            blob_id = self._send_blob({"id": head["id"]}, data, size)
            self._channel.send(kind, {**head, "blob": blob_id, "size": size})

    def _on_tool_call(self, run: Run, message: link.Message) -> None:
        call_id = message.head.text("call", 64)
        name = message.head.text("name", 256)
        data: Union[bytes, int] = message.body if message.memfd is None else message.memfd
        if not run.visible or len(run.calls) >= MAX_TOOL_CALLS or call_id in run.calls or run.ended_by is not None:
            if isinstance(data, int):
                os.close(data)
            self._refuse_call(call_id, "the call is not possible now")
            return
        self._drain_pipes(run)
        run.open_call(call_id, name)
        self._send_payload(Kind.TOOL_CALL, {"id": run.execution_id, "call": call_id, "name": name}, data, message.size)

    def _refuse_call(self, call_id: str, message: str) -> None:
        self._post_to_interpreter({"t": "tool_result", "call": call_id, "ok": False, "type": "RuntimeError", "message": message})

    def _on_tool_result(self, head: Fields, body: bytes) -> None:
        run = self._run
        call_id = head.text("call", 64)
        blob = self._take_blob(head.text("blob", 64)) if "blob" in head else None
        if run is None or run.execution_id != head.text("id", 64) or call_id not in run.calls:
            if blob is not None:
                os.close(blob.fd)
            return  # the daemon answers the client from its own books; this one came too late
        name = run.close_call(call_id)
        message: dict[str, Any] = {"t": "tool_result", "call": call_id, "ok": head.boolean("ok")}
        if not message["ok"]:
            message["type"] = head.text("type", 256)
            message["message"] = head.text("message", 8192)
        elif any(tool["name"] == name and tool["final"] for tool in self._tools):
            message["final"] = True
            run.final_call_id = run.final_call_id or call_id
        if blob is not None:
            self._post_to_interpreter(message, memfd=blob.fd)
        else:
            self._post_to_interpreter(message, body)

    # -- the end of a run ----------------------------------------------------------------------------------------

    def _on_done(self, run: Run, head: Fields, body: bytes) -> None:
        self._drain_pipes(run)
        run.operations = head.integer("operations", default=0)
        outcome = run.ended_by or head.text("outcome", 32)
        detail = json.loads(body) if body else None
        if run.ended_by is not None:
            detail = None
        self._finish(run, outcome, detail)

    def _finish_refused(self, run: Run, detail: dict[str, Any], outcome: str = "exception") -> None:
        """The source never ran."""
        self._finish(run, outcome, detail)

    def _finish(self, run: Run, outcome: str, detail: Optional[dict[str, Any]], **more: Any) -> None:
        """Tells the daemon how a run ended, and goes on to the next job."""
        if self._run is run or self._run is None:
            self._finish_output(run)
        if not run.visible:
            self._finish_prelude(outcome, detail)
        else:
            self._send_result(run, outcome, detail, more)
        for pipe in run.pipes:
            self._watch(pipe.read_fd, 0, None)
        run.close()
        if self._run is run:
            self._run = None
            self._next_job()

    def _finish_output(self, run: Run) -> None:
        self._flush_log()
        if not run.visible:
            return
        for notice in self._notices:
            self._send_log(run, "stderr", notice)
        self._notices = []
        tail = run.cutter.drain()
        if run.cutter.omitted_bytes:
            self._decoder = StreamDecoder()
            self._channel.send(Kind.OUTPUT_CUT, {"id": run.execution_id, "omitted": run.cutter.omitted_bytes})
        for stream, data in tail:
            self._send_log(run, stream, self._decoder.decode(stream, data))
        for stream, text in self._decoder.reset():
            self._send_log(run, stream, text)
        self._decoder = StreamDecoder()

    def _finish_prelude(self, outcome: str, detail: Optional[dict[str, Any]]) -> None:
        said = "" if outcome == "succeeded" else f"the prelude ended as {outcome}: {(detail or {}).get('message', '')}"
        op, self._configuring = self._configuring, None
        if op is None:
            if said:
                self._notices.append(said + "\n")
        elif said:
            self._failed(op, "prelude_failed", said)
        else:
            self._done(op)

    def _send_result(self, run: Run, outcome: str, detail: Optional[dict[str, Any]], more: dict[str, Any]) -> None:
        spent = usage.peak_memory_bytes(self._interpreter.pid) if self._interpreter is not None else 0
        head: dict[str, Any] = {
            "id": run.execution_id,
            "outcome": outcome,
            "variables": "reset" if self._variables_reset else "kept",
            "generation": self.generation,
            "final": run.final_call_id,
            "operations": run.operations,
            "wall_time_s": run.wall_time_s(),
            "cpu_time_s": more.pop("cpu_time_s", self._cpu_time_s(run) if run.phase != Phase.CHECKING else 0.0),
            "peak_memory_bytes": spent,
            "output_bytes": run.cutter.total_bytes,
            **more,
        }
        self._variables_reset = False
        error_body = json.dumps(detail).encode() if detail else b""
        head["error"] = len(error_body)
        output, run.output = run.output, None
        if output is None or outcome not in ("succeeded", "exited"):
            if isinstance(output, int):
                os.close(output)
            self._channel.send(Kind.RESULT, head, error_body)
        elif isinstance(output, bytes):
            self._channel.send(Kind.RESULT, {**head, "output": run.output_size}, error_body + output)
        else:
            blob_id = self._send_blob({"id": run.execution_id}, output, run.output_size)
            self._channel.send(Kind.RESULT, {**head, "blob": blob_id, "size": run.output_size}, error_body)

    # -- children ------------------------------------------------------------------------------------------------

    def _start_children(self) -> None:
        self._start_interpreter()
        self._start_checker()

    def _abandon(self) -> None:
        """In a forked child: closes all that belongs to the supervisor."""
        self._poll.close()
        os.close(self._wakeup_read)
        os.close(self._wakeup_write)
        self._channel.close_all()
        for child in (self._interpreter, self._checker):
            if child is not None:
                child.close()
        if self._run is not None:
            for pipe in self._run.pipes:
                os.close(pipe.read_fd)
        for fd in (*(b.fd for b in self._blobs.values()), *(d for _, d, _ in self._gathered if isinstance(d, int))):
            os.close(fd)

    def _fork(self, target: Callable[[socket.socket, Config], None]) -> Child:
        """Forks a child. When no process is left for it, whatever fills the sandbox has to go."""
        try:
            return spawn(lambda sock: target(sock, self._config), self._abandon)
        except OSError:
            kill_everything()
            return spawn(lambda sock: target(sock, self._config), self._abandon)

    def _start_interpreter(self) -> None:
        self._interpreter = self._fork(self._interpreter_main)
        self._rewatch_interpreter()

    def _start_checker(self) -> None:
        self._checker = self._fork(self._checker_main)
        self._checker_uses = 0
        self._watch(self._checker.sock.fileno(), select.EPOLLIN, self._on_checker)

    def _rewatch_interpreter(self) -> None:
        interpreter = self._interpreter
        if interpreter is not None:
            events = 0 if self._children_paused else select.EPOLLIN
            if interpreter.blocked:
                events |= select.EPOLLOUT
            self._watch(interpreter.sock.fileno(), events, self._on_interpreter)

    def _set_children_paused(self, paused: bool) -> None:
        """Stops reading what the program says while the daemon does not take it, and starts again."""
        if paused == self._children_paused:
            return
        self._children_paused = paused
        self._rewatch_interpreter()
        if self._run is not None:
            for pipe in self._run.pipes:
                handler = None if paused else (lambda _events, pipe=pipe: self._on_pipe(pipe))
                self._watch(pipe.read_fd, select.EPOLLIN, handler)

    def _post_to_interpreter(
        self, head: dict[str, Any], body: bytes = b"", memfd: Optional[int] = None, fds: tuple[int, ...] = ()
    ) -> None:
        interpreter = self._interpreter
        assert interpreter is not None
        try:
            interpreter.post(head, body, memfd, fds)
        except ChildStuck:
            os.kill(interpreter.pid, signal.SIGKILL)
        if interpreter.blocked:
            self._rewatch_interpreter()

    def _post_settings(self) -> None:
        body = json.dumps({"authorized": self._authorized}).encode()
        self._post_to_interpreter({"t": "settings"}, body)

    def _kill_checker_process(self) -> None:
        if self._checker is not None:
            os.kill(self._checker.pid, signal.SIGKILL)

    def _kill_checker(self) -> None:
        """Ends the checker and starts another, for the next source."""
        checker = self._checker
        if checker is not None:
            self._watch(checker.sock.fileno(), 0, None)
            os.kill(checker.pid, signal.SIGKILL)
            checker.close()
            self._checker = None
        self._start_checker()

    def _on_checker_exit(self, status: int) -> None:
        checker = self._checker
        assert checker is not None
        self._watch(checker.sock.fileno(), 0, None)
        checker.close()
        self._checker = None
        run = self._run
        if run is not None and run.phase == Phase.CHECKING:
            code, signum = describe_exit(status)
            if not run.checker_retried:
                run.checker_retried = True  # agent code of an earlier step may have killed it
                self._post_to_checker(run)
                return
            how = f"signal {signum}" if signum is not None else f"exit code {code}"
            self._finish_refused(run, error("SyntaxError", f"the source cannot be parsed: the parser ended with {how}", line=1))
        if self._checker is None:
            self._start_checker()

    def _on_interpreter_exit(self, status: int) -> None:
        """It died by itself, or of what its own code did."""
        code, signum = describe_exit(status)
        run = self._run
        if run is None and self._operation is None:
            self._boot_failures += 1
        detail: Optional[dict[str, Any]] = None
        outcome = "crashed"
        if code is not None:
            outcome = "exited"
            detail = error("SystemExit", f"the program ended its interpreter with exit code {code}", exit_code=code)
        elif run is not None and run.ended_by is None:
            name = signal.Signals(signum).name if signum in signal.valid_signals() else f"signal {signum}"
            detail = error("Crash", f"the interpreter died of {name}")
        self._replace_interpreter("died", outcome, detail, signum)

    def _replace_interpreter(
        self, why: str, outcome: str = "crashed", detail: Optional[dict[str, Any]] = None, signum: Optional[int] = None
    ) -> None:
        """Kills everything in the sandbox, ends what ran in the interpreter, and starts another."""
        run, operation = self._run, self._operation
        cpu = self._cpu_time_s(run) if run is not None and run.phase != Phase.CHECKING else 0.0
        interpreter, self._interpreter = self._interpreter, None
        if interpreter is not None:
            self._watch(interpreter.sock.fileno(), 0, None)
            interpreter.close()
        if self._checker is not None:
            self._watch(self._checker.sock.fileno(), 0, None)
            self._checker.close()
            self._checker = None
        kill_everything()
        self.generation += 1
        self._variables_reset = True
        if self._boot_failures >= _MAX_BOOT_FAILURES:
            self._stop = True
            return
        # What the program wrote before it died is still in the pipes.
        if run is not None and run.phase != Phase.CHECKING:
            self._drain_pipes(run)
        self._start_children()
        self._post_settings()
        if self._tools:
            self._post_to_interpreter({"t": "tools"}, json.dumps(self._tools).encode())
        self._end_interrupted(run, operation, outcome, detail, signum, cpu)

    def _end_interrupted(
        self,
        run: Optional[Run],
        operation: Optional[_Job],
        outcome: str,
        detail: Optional[dict[str, Any]],
        signum: Optional[int],
        cpu_time_s: float,
    ) -> None:
        """Reports on what was going on when the interpreter went, then puts the prelude in place again."""
        replay = bool(self._prelude) and self._configuring is None
        if run is not None and run.phase == Phase.CHECKING:
            # It died while the next source was being checked: the checker went too, so check again.
            run.checker_retried = True
            if not replay:
                self._post_to_checker(run)
                return
            job = _Job(Kind.EXECUTE, Fields({"id": run.execution_id, **run.settings._asdict()}), run.source.encode(), time.monotonic())
            self._jobs.appendleft(job)
            self._run_count -= 1
            self._run = None
        elif run is not None:
            self._run = None
            final = run.ended_by or outcome
            suspect = run.ended_by is None and signum == signal.SIGKILL
            jobs, self._jobs = self._jobs, deque()  # nothing starts before the prelude
            self._run = run
            self._finish(run, final, None if run.ended_by else detail, oom_suspect=suspect, cpu_time_s=cpu_time_s)
            self._jobs = jobs
        elif operation is not None:
            self._operation = None
            _close_gathered(self._gathered)
            self._gathered = []
            self._failed(operation.head.integer("op"), "value_refused", "the interpreter died or hung over these values")
        if replay:
            self._begin_run("", self._prelude, _PRELUDE)
        else:
            self._next_job()

    # -- blobs and files -----------------------------------------------------------------------------------------

    def _on_blob_begin(self, head: Fields) -> None:
        op, blob_id = head.integer("op"), head.text("blob", 64)
        size = head.integer("size", 0)
        staged = sum(blob.size for blob in self._blobs.values())
        if blob_id in self._blobs or len(self._blobs) >= MAX_BLOBS or staged + size > MAX_BLOB_BYTES:
            self._failed(op, "too_large", f"at most {MAX_BLOBS} blobs and {MAX_BLOB_BYTES} bytes can be staged at a time")
            return
        self._blobs[blob_id] = _Blob(size)
        self._done(op)

    def _on_blob_data(self, head: Fields, data: bytes) -> None:
        blob = self._blobs.get(head.text("blob", 64))
        if blob is None:
            return
        if blob.received + len(data) > blob.size:
            raise FrameError("more blob data than announced")
        os.write(blob.fd, data)
        blob.received += len(data)

    def _take_blob(self, blob_id: str) -> Optional[_Blob]:
        """A complete blob, sealed; its descriptor is the caller's. None when there is none."""
        blob = self._blobs.pop(blob_id, None)
        if blob is None:
            return None
        if blob.received != blob.size:
            os.close(blob.fd)
            return None
        link.seal(blob.fd)
        return blob

    def _on_file(self, kind: int, head: Fields) -> None:
        op, path = head.integer("op"), head.text("path", workspace.MAX_PATH_CHARS + 1)
        try:
            if kind == Kind.FILE_LIST:
                entries, truncated = workspace.list_files(self._config.workspace, path)
                self._list_done(op, entries, truncated)
            elif len(self._uploads) + len(self._downloads) >= MAX_TRANSFERS:
                self._failed(op, "too_large", f"at most {MAX_TRANSFERS} files can be transferred at a time")
            elif kind == Kind.FILE_GET:
                download = workspace.Download(self._config.workspace, path, head.integer("max_bytes"))
                self._downloads[op] = download
                self._channel.send(Kind.FILE_CHUNK, {"op": op, "file": download.info})
            else:
                self._serial += 1
                self._uploads[op] = workspace.Upload(self._config.workspace, path, head.integer("size"), self._serial)
                self._on_file_data(head, b"")
        except workspace.PathRefused as refused:
            self._path_failed(op, refused)

    def _list_done(self, op: int, entries: list[dict[str, Any]], truncated: bool) -> None:
        body = json.dumps(entries).encode()
        while len(body) > _INLINE_TOTAL_BYTES:
            entries, truncated = entries[: len(entries) // 2], True
            body = json.dumps(entries).encode()
        self._done(op, body, truncated=truncated)

    def _path_failed(self, op: int, refused: workspace.PathRefused) -> None:
        self._failed(op, "file_not_found" if refused.missing else "path_refused", str(refused))

    def _on_file_data(self, head: Fields, data: bytes) -> None:
        op = head.integer("op")
        upload = self._uploads.get(op)
        if upload is None:
            return  # it failed, and the daemon has been told
        try:
            upload.write(data)
            if head.boolean("abandon", default=False):
                upload.abandon()
            elif upload.remaining == 0:
                self._done(op, file=upload.finish())
            else:
                return
        except workspace.PathRefused as refused:
            upload.abandon()
            self._path_failed(op, refused)
        del self._uploads[op]

    def _pump_downloads(self) -> None:
        """Sends more of the files that are on their way out, as far as the daemon takes it."""
        for op, download in list(self._downloads.items()):
            while not self._channel.full:
                data = download.read(CHUNK_BYTES)
                if not data:
                    download.close()
                    del self._downloads[op]
                    self._done(op)
                    break
                self._channel.send(Kind.FILE_CHUNK, {"op": op}, data)


def _close_gathered(gathered: list[tuple[str, Union[bytes, int], int]]) -> None:
    for _, data, _ in gathered:
        if isinstance(data, int):
            os.close(data)
