"""The interpreter: the child in which agent code runs and its variables live.

From the first execution on, this process belongs to the agent code as much as to us: nothing it says is evidence. What
is here serves the program that plays by the rules, and ends it cleanly when its time is up; the supervisor and the
kernel stand behind. References to what we need are taken before agent code runs, so that patching a module by accident
breaks little.
"""

from __future__ import annotations

import gc
import linecache
import marshal
import mmap
import os
import resource
import sys
import threading
import types
from itertools import compress

from executor_api.limits import VARIABLES_BYTES_MAX, VARIABLES_MAX
from executor_api.values import EncodeError, OpaqueValue
from executor_api.values.objects import type_name_of

from . import display, libc, link
from .audit import Audit
from .control import ExecutionInterrupted, FinalAnswerGiven, Refusal
from .dynamic import agent_builtins
from .failures import describe, text_of
from .fitness import reason_of, why_unfit
from .frames import Fields
from .guard import guard
from .hooks import Hooks
from .host_tools import Inbox, ToolBox, decode_value, encode_value
from .instrument import LastValue, Sentinels, bind
from .lean import dumps, loads, signal
from .meter import Meter, OperationLimitExceeded
from .referee import Referee
from .relays import Relays
from .restricted import Builtins
from .rules import Rules
from .session_tools import SessionTools
from .shipped import missing_modules
from .streams import Streams

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Callable, Optional, Union

    from .state_world import World

# For what decoding and encoding variables may run of agent code.
OPERATION_BUDGET = 10**8
_CO_COROUTINE = 0x80


def settle(config: Any) -> None:
    """Turns the forked copy of the supervisor into an ordinary process with limits of its own."""
    os.setsid()
    # Ordinary again: until now it was as closed to others as the supervisor, and /proc/self belonged to root.
    libc.function("prctl")(libc.PR_SET_DUMPABLE, 1, 0, 0, 0)
    for number in signal.valid_signals():
        # Python itself ignores SIGPIPE and SIGXFSZ: they become exceptions.
        kept = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT)
        if number not in kept and signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel should take this process, not the supervisor
    # A little before the sandbox's end, so that running out of memory is mostly a MemoryError and state is kept. It is
    # a convenience where a control group is the wall, and then a program may lift it that reserves what it never uses,
    # as a browser does.
    _limit(resource.RLIMIT_DATA, config.memory_bytes // 10 * 9, for_good=config.watch_memory)
    _limit(resource.RLIMIT_CORE, 0)
    if config.processes:
        _limit(resource.RLIMIT_NPROC, config.processes)


# Of data, for what is done between two programs: one that ran out of memory keeps all that it holds.
_HEADROOM_BYTES = 2 * 1024 * 1024


def _move_data_limit(by_bytes: int) -> None:
    """A program may have moved its limit itself; then it is moved from there, as far as that can be done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft != resource.RLIM_INFINITY:
        moved = max(soft + by_bytes, 0)
        resource.setrlimit(resource.RLIMIT_DATA, (moved if hard == resource.RLIM_INFINITY else min(moved, hard), hard))


def _limit(what: int, value: int, *, for_good: bool = True) -> None:
    _, hard = resource.getrlimit(what)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(what, (bound, bound if for_good else hard))


def interpreter_main(sock: socket.socket, config: Any, modules: list[str]) -> None:
    """Imports the modules ahead, then serves the supervisor until it closes the link. Runs in the forked child."""
    settle(config)
    import site

    archive = sys.path.pop(0)
    site.main()
    sys.argv = [""]
    interpreter = Interpreter(sock, config)
    if modules:
        interpreter.import_ahead(modules)  # here, where what agent code left in the workspace is no module
    # Behind the libraries, so that a file of the workspace can't pass for one of them.
    sys.path += [config.workspace, archive]
    interpreter.serve()


class Interpreter:
    """Runs one command of the supervisor after the other in the main thread."""

    def __init__(self, sock: socket.socket, config: Any) -> None:
        self._sock = sock
        self._inbox = Inbox(sock)
        self._tools = ToolBox(sock, self._inbox)
        self._meter = Meter()
        self._sentinels = Sentinels.of(config.mark)
        self._referee = Referee(self._meter)
        self._main = types.ModuleType("__main__")
        self._hooks = Hooks(self._referee)
        self._names: dict[str, Any] = agent_builtins(
            referee=self._referee,
            meter=self._meter,
            guard=guard,
            sentinels=self._sentinels,
            hooks=self._hooks,
            imported=lambda module: self._relays.guard(module),
        )
        self._names["display"] = display.display
        self._builtins = Builtins(self._names, self._referee, self._hooks)
        self._audit = Audit(self._names, self._referee, config.workspace)
        sys.modules["__main__"] = self._main
        self._relays = Relays(self._names, self._referee)
        display.connect(self._tools.show)
        self._session_tools = SessionTools(self._tools.stub, self._guarded, self._builtins, self._main)
        self._staged: dict[str, Any] = {}
        self._staging_error = ""
        self._last_value = LastValue()
        self._output = b""
        self._in_agent_code = False
        self._loop: Any = None
        self._pid = os.getpid()
        self._memory_bytes: int = config.memory_bytes
        # Captured: agent code may replace these names in their modules.
        self._getpid, self._exit = os.getpid, os._exit
        self._loads, self._bind, self._send_message = marshal.loads, bind, link.send
        self._encode = encode_value

        self._streams = Streams()
        os.register_at_fork(after_in_child=self._after_fork)
        threading.excepthook = _unless_final_answer(threading.excepthook)

    def import_ahead(self, modules: list[str]) -> None:
        """Imports modules of the image before the first program asks for them. What they print goes nowhere."""
        from . import preload

        # The streams are on the descriptors of the programs to come: a module that keeps one can print with it later.
        preload.import_ahead(modules, self._send)
        self._streams.put_back()
        self._streams.settle()
        gc.collect()
        gc.freeze()  # what stays for good need not be searched for garbage again and again

    def serve(self) -> None:
        signal.signal(signal.SIGINT, self._on_interrupt)
        encode_value(0)  # once for nobody: what Python sets up lazily is there when somebody waits
        self._send({"t": "booted"})
        handlers: dict[str, Callable[[link.Message], None]] = {
            "settings": self._on_settings,
            "tools": self._session_tools.on_tools,
            "part": self._on_part,
            "ship": self._on_ship,
            "drop": self._session_tools.on_drop,
            "run": self._on_run,
            "variable": self._on_variable,
            "commit": self._on_commit,
            "forget": self._on_forget,
            "get": self._on_get,
            "find": self._on_find,
            "export": self._on_export,
            "restore": self._on_restore,
        }
        while True:
            try:
                message = self._inbox.command()
                handlers[message.head.text("t", 32)](message)
            except link.LinkClosed:
                return
            except Exception as problem:
                # Exceptions of agent code are caught where it runs, so this is ours: programs before this one have
                # left the process so, and nobody is to take it for the doing of the next one.
                self._send({"t": "unfit", "why": reason_of(problem)})
                raise

    def _send(self, head: dict[str, Any], body: bytes = b"") -> None:
        self._send_message(self._sock, head, body)

    def _after_fork(self) -> None:
        """A process that agent code forked has no business on the link."""
        self._sock.close()

    def _on_interrupt(self, _signum: int, _frame: Any) -> None:
        if self._in_agent_code and not self._inbox.defer_interrupt():
            raise ExecutionInterrupted

    # -- settings, tools, variables --------------------------------------------------------------------------------

    def _on_settings(self, message: link.Message) -> None:
        self._referee.rules = Rules.read(Fields(loads(link.read_body(message))))
        self._builtins.on_rules()
        self._audit.on_rules()

    def _on_part(self, message: link.Message) -> None:
        self._session_tools.take_part(message, _view(message))

    def _on_ship(self, message: link.Message) -> None:
        head, body = self._session_tools.make(message)
        if self._getpid() != self._pid:
            self._exit(0)  # a process that the client's code has forked came back from it as if it were this one
        self._streams.settle()  # what it has printed is no program's
        self._send(head, body)

    def _on_variable(self, message: link.Message) -> None:
        name = message.head.text("name", 256)
        try:
            self._staged[name] = self._guarded(decode_value, _view(message))
        except BaseException as error:  # noqa: BLE001 (the border of agent code: unpickling runs what it wants)
            self._staging_error = self._staging_error or f"variable {name}: {text_of(error)}"

    def _on_commit(self, _message: link.Message) -> None:
        staged, failed = self._staged, self._staging_error
        self._staged, self._staging_error = {}, ""
        if not failed:
            self._main.__dict__.update(staged)
        self._send({"t": "op_done", "ok": not failed, "message": failed[:4000]})

    def _on_forget(self, _message: link.Message) -> None:
        self._staged, self._staging_error = {}, ""

    def _on_get(self, command: link.Message) -> None:
        namespace = self._main.__dict__
        names = loads(link.read_body(command)) or [
            name for name, value in list(namespace.items()) if _is_variable(name, value)
        ]
        if len(names) > VARIABLES_MAX:
            message = f"there are {len(names)} variables; at most {VARIABLES_MAX} can be got at once"
            self._send({"t": "op_done", "ok": False, "message": message})
            return
        left_bytes = VARIABLES_BYTES_MAX
        try:
            for name in names:
                if name in namespace:
                    packed = self._packed(namespace[name])
                    left_bytes -= len(packed)
                    if left_bytes < 0:
                        why = f"all that are got at once have at most {VARIABLES_BYTES_MAX} bytes together; name fewer"
                        raise EncodeError(why)
                    self._send({"t": "variable", "name": name}, packed)
        except BaseException as error:  # noqa: BLE001 (the border of agent code: its __repr__ runs here)
            self._send({"t": "op_done", "ok": False, "message": f"variable {name}: {text_of(error)}"[:4000]})
            return
        missing = [name for name in names if name not in namespace]
        self._send({"t": "op_done", "ok": True}, dumps(missing))

    def _packed(self, value: Any) -> bytes:
        """A variable, or what stands for one whose own code gets in the way: no other one is lost over it."""
        try:
            return self._guarded(self._encode, value)  # type: ignore[no-any-return]
        except EncodeError:
            raise  # it is too large, and whoever asked for it is told
        except BaseException as error:  # noqa: BLE001 (the border of agent code: its __repr__ runs here)
            why = f"<it cannot be read: {text_of(error)}>"
            return self._encode(OpaqueValue(type_name_of(type(value)), why))

    def _on_find(self, command: link.Message) -> None:
        """Before any program has run: which modules the image lacks."""
        self._send({"t": "op_done", "ok": True}, dumps(missing_modules(loads(link.read_body(command)))))

    def _on_export(self, command: link.Message) -> None:
        from .state_export import export

        try:
            max_bytes = command.head.integer("max_bytes")
            memfd, manifest = self._guarded(export, self._world(), max_bytes, self._audit.off, self._settle_copy)
        except BaseException as error:  # noqa: BLE001 (the border of agent code: it can have changed what is used here)
            self._send({"t": "op_done", "ok": False, "message": text_of(error)[:4000]})
            return
        try:
            link.forward(self._sock, {"t": "state"}, memfd)
        finally:
            os.close(memfd)
        self._send({"t": "op_done", "ok": True}, dumps(manifest))

    def _settle_copy(self) -> None:
        """In a copy that pickles: it ends when it is told to, and nothing that it prints goes anywhere."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def _on_restore(self, command: link.Message) -> None:
        from .state_restore import restore

        memfd = command.memfd
        assert memfd is not None, "a state comes as a memory file"
        try:
            manifest = restore(self._world(), memfd, command.size, self._guarded)
        except BaseException as error:  # noqa: BLE001 (the border of agent code: unpickling runs what it wants)
            answer: dict[str, Any] = {"t": "op_done", "ok": False, "message": text_of(error)[:4000]}
            body = b""
        else:
            answer, body = {"t": "op_done", "ok": True}, dumps(manifest)
        if self._getpid() != self._pid:
            self._exit(0)  # a process that unpickling has forked came back from it as if it were this one
        self._streams.settle()  # what it has printed is no program's
        self._send(answer, body)

    def _world(self) -> World:
        from .state_world import World

        constants = {"ticks": self._meter.ticks, "guard": guard, "next": next, "compress": compress}
        return World(self._main, self._names, self._referee, self._hooks, constants, self._memory_bytes)

    def _guarded(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls what may run agent code, outside an execution."""
        self._meter.start(OPERATION_BUDGET)
        try:
            return function(*args)
        finally:
            self._meter.finish()

    # -- executions ------------------------------------------------------------------------------------------------

    def _on_run(self, message: link.Message) -> None:
        head = message.head
        body = link.read_body(message)
        size = head.integer("source")
        source, filename = body[:size].decode("utf-8", "surrogatepass"), head.text("filename", 64)
        self._streams.connect(message.fds)
        linecache.cache[filename] = (size, None, source.splitlines(keepends=True), filename)
        code, spans = self._loads(body[size:])
        last = self._last_value = LastValue()
        code = self._bind(
            code, self._sentinels.constants(ticks=self._meter.ticks, guard=guard, keep=last, hooks=self._hooks)
        )
        marks: dict[int, list[str]] = {}
        for name, mark in head.values["marks"].items():
            marks.setdefault(mark, []).append(name)
        calls = {mark: lambda names=names: self._warn(names) for mark, names in marks.items()}
        self._meter.start(head.integer("operations"), calls, head.values["of_session"])
        self._referee.begin()
        _move_data_limit(-_HEADROOM_BYTES)
        outcome, detail = self._run_agent_code(code, filename, source, spans)
        _move_data_limit(_HEADROOM_BYTES)
        self._referee.end()
        operations = self._meter.finish()
        self._last_value = LastValue()
        error = dumps(detail) if detail else b""
        output, self._output = self._output, b""
        end = {"t": "done", "filename": filename, "outcome": outcome, "operations": operations, "error": len(error)}
        self._streams.disconnect()  # before the end is told: what of the run's pipes is open then, others hold
        why = why_unfit(self._streams.null, self._encode)
        self._send({**end, "unfit": why} if why else end, error + output)

    def _warn(self, limits: list[str]) -> None:
        """Says that a budget is nearly spent: now if it can be, else the supervisor does when the program has ended."""
        if self._getpid() != self._pid:
            return
        try:
            for limit in limits:
                self._send({"t": "limit", "limit": limit})
        except (RecursionError, MemoryError):
            return  # the program is at its own end; it must not meet ours

    def _run_agent_code(
        self, code: types.CodeType, filename: str, source: str, spans: list[list[int]]
    ) -> tuple[str, Optional[dict[str, Any]]]:
        """Runs the code; what it showed and its value are sent from within, where the deadline still holds."""
        try:
            try:
                self._in_agent_code = True
                self._evaluate(code)
                display.show_open_figures()
                self._send_output()
                self._streams.flush()
            except FinalAnswerGiven:
                display.show_open_figures()
                self._streams.flush()
            finally:
                self._in_agent_code = False
        except BaseException as error:  # noqa: BLE001 (the border of agent code)
            if self._getpid() != self._pid:
                self._exit(1)
            self._streams.settle()
            return self._classify(error, filename, source, spans)
        if self._getpid() != self._pid:
            # A process that the program forked fell through to here; it is not the session.
            self._exit(0)
        swallowed = self._decisive()
        return ("succeeded", None) if swallowed is None else self._classify(swallowed, filename, source, spans)

    def _decisive(self) -> Optional[BaseException]:
        """Ends an execution, whatever has become of it: a thread, a finalizer or a library may have swallowed it."""
        return self._referee.refusal or self._meter.raised

    def _evaluate(self, code: types.CodeType) -> None:
        self._main.__dict__["__builtins__"] = self._names  # whatever an earlier program made of them
        result = eval(code, self._main.__dict__)
        if code.co_flags & _CO_COROUTINE:
            if self._loop is None:
                import asyncio

                self._loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(result)

    def _send_output(self) -> None:
        """Encodes the value of the program; a small one goes with the end, a large one now."""
        value = self._last_value.value
        if value is None:
            return
        packed = self._encode(value)
        if len(packed) <= link.INLINE_BYTES // 2:
            self._output = packed
        else:
            self._send({"t": "output"}, packed)

    def _classify(
        self, error: BaseException, filename: str, source: str, spans: list[list[int]]
    ) -> tuple[str, Optional[dict[str, Any]]]:
        error = self._decisive() or error
        self._meter.finish()  # from here on, str() and repr() of the program's exceptions are free
        if isinstance(error, SystemExit):
            return "exited", {"type": "SystemExit", "message": text_of(error), "exit_code": _exit_code(error)}
        detail = describe(error, filename, source, spans)
        if isinstance(error, OperationLimitExceeded):
            return "operation_limit", detail
        if isinstance(error, MemoryError):
            return "out_of_memory", {**detail, "message": detail["message"] or "out of memory"}
        if isinstance(error, Refusal):
            return error.outcome, detail
        return "exception", detail


def _view(message: link.Message) -> Union[bytes, memoryview]:
    """The body where it lies: decoding a large value copies it once as it is."""
    if message.memfd is None:
        return message.body
    try:
        if not message.size:
            return b""  # which can't be mapped
        return memoryview(mmap.mmap(message.memfd, message.size, prot=mmap.PROT_READ))
    finally:
        os.close(message.memfd)


def _is_variable(name: object, value: Any) -> bool:
    skipped = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    # Agent code can put anything among its globals, also what is no name at all.
    return isinstance(name, str) and len(name) <= 256 and name[:1] != "_" and not isinstance(value, skipped)


def _unless_final_answer(report: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A thread that gave the final answer has not failed: there is nothing to print of it."""

    def report_others(args: Any) -> None:
        if args.exc_type is not FinalAnswerGiven:
            report(args)

    return report_others


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1
