"""The interpreter: the child process in which agent code runs and its variables live.

From its first execution on, this process belongs to agent code as much as to the guest, so none of its reports is
evidence. The code here serves programs that keep to the rules, and ends them cleanly when their time is up. The
supervisor and the kernel enforce the limits. Functions are captured before agent code runs, so a program that patches a
module by accident breaks little.
"""

from __future__ import annotations

import gc
import os
import sys

from executor_api.limits import VARIABLES_NAMED_MAX

from ..checks.rules import Rules
from ..wire import link
from ..wire.lean import dumps, signal
from ..wire.link_messages import (
    Answered,
    BeginBranch,
    Booted,
    CommitVariables,
    DropTools,
    EndBranch,
    ExportState,
    FindModules,
    ForgetVariables,
    GetVariables,
    LinkMessage,
    PlaceTools,
    RestoreFiles,
    RestoreState,
    RunProgram,
    SetRules,
    ShipTools,
    TakeSavepoint,
    ToolPart,
    Unfit,
    Variable,
    message_of,
)
from ..wire.messages import MAX_NAME_CHARS
from ..wire.schema import read_object, read_texts
from ..wire.session_rules import CodeRules
from . import display
from .drawing import Drawer
from .encoding import encode_value
from .execution import Executions, keep_final_answers_quiet
from .fitness import reason_of
from .host_tools import ToolBox
from .inbox import Inbox
from .inherited import renew_random_state, take_fork_handlers
from .own_process import OwnProcess, settle
from .runtime import Runtime
from .session_tools import SessionTools
from .session_variables import apply_variables, python_path
from .shipped import missing_modules
from .site_packages import add_environment, add_site, leave_archive, prepare_installers
from .streams import Streams
from .variables import States, Variables, view

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any, Callable, Union

    from executor_api.values.packing import Parts


def interpreter_main(sock: socket.socket, config: Any, modules: list[str]) -> None:
    """Preimports the modules, then serves the supervisor until it closes the link. Runs in the forked child."""
    take_fork_handlers()
    settle(config)
    leave_archive()
    standard_library = len(sys.path)
    apply_variables(config.variables)
    if config.has_environment:
        add_environment()  # first, so that it is ahead of the image's packages
    prepare_installers(has_network=config.egress_listener is not None, ahead_of=standard_library)
    add_site()
    renew_random_state()
    sys.argv = [""]
    interpreter = Interpreter(sock, config)
    if modules:
        interpreter.import_ahead(modules)  # before the workspace is on the path, so that none of its files is imported
    sys.path[:0] = python_path(config.variables)
    # Behind the libraries, so that no file of the workspace can replace one of them.
    sys.path.append(config.workspace)
    interpreter.serve()


class Interpreter:
    """Serves one command of the supervisor after the other in the main thread."""

    def __init__(self, sock: socket.socket, config: Any) -> None:
        self._sock = sock
        self._send_message = link.send  # captured: agent code may replace the name in its module
        self._inbox = Inbox(sock)
        self._process = OwnProcess()
        self._tools = ToolBox(sock, self._inbox, self._process)
        self._runtime = runtime = Runtime(config)
        display.connect(self._tools.show, Drawer(self._send, runtime), config.workspace)
        self._session_tools = SessionTools(self._tools.stub, runtime.guarded, runtime.builtins, runtime.main)
        self._streams = Streams()
        self._executions = Executions(runtime, self._streams, self._process, self._inbox, self._send)
        self._variables = Variables(runtime, self._send)
        self._states = States(runtime, self._streams, self._process, sock, self._send)
        self._keeps_link = False  # true while this process forks savepoints
        os.register_at_fork(after_in_child=self._leave_link)
        self._file_cache: Any = None
        self._branch: Any = None
        self._config = config
        keep_final_answers_quiet()

    def _leave_link(self) -> None:
        """Closes the link in a process that agent code forked, which must not use it."""
        if not self._keeps_link:
            self._sock.close()

    def import_ahead(self, modules: list[str]) -> None:
        """Imports modules of the image before the first program asks for them. Their output is dropped."""
        from . import preload

        # Later programs print to the same descriptors: a module that keeps a stream can still print with it.
        preload.import_ahead(modules, self._send)
        self._streams.put_back()
        self._streams.settle()
        gc.collect()
        gc.freeze()  # modules stay for good: the collector need not search them again and again

    def serve(self) -> None:
        signal.signal(signal.SIGINT, self._executions.on_interrupt)
        encode_value(0)  # triggers Python's lazy initialization now, while no client waits
        self._send(Booted())
        handlers: dict[type[LinkMessage], Callable[[Any, link.Packet], None]] = {
            SetRules: self._on_rules,
            PlaceTools: self._session_tools.on_tools,
            ToolPart: self._on_part,
            ShipTools: self._on_ship,
            DropTools: self._session_tools.on_drop,
            RunProgram: self._executions.on_run,
            Variable: self._variables.on_variable,
            CommitVariables: self._variables.on_commit,
            ForgetVariables: self._variables.on_forget,
            GetVariables: self._variables.on_get,
            FindModules: self._on_find,
            ExportState: self._states.on_export,
            RestoreState: self._states.on_restore,
            TakeSavepoint: self._on_savepoint,
            BeginBranch: self._on_branch,
            EndBranch: self._on_branch,
            RestoreFiles: self._on_branch,
        }
        while True:
            try:
                packet = self._inbox.command()
                if self._process.between:
                    self._process.wait_between()
                message = message_of(packet)
                handlers[type(message)](message, packet)
            except link.LinkClosed:
                return
            except Exception as problem:
                # Exceptions of agent code are caught where it runs. So the guest's own code failed here, because of
                # what earlier programs did to the process, and the next program is not to blame.
                self._send(Unfit(why=reason_of(problem)))
                raise

    def _send(self, message: LinkMessage, body: Union[bytes, Parts] = b"") -> None:
        self._send_message(self._sock, message, body)

    def _on_rules(self, _message: SetRules, packet: link.Packet) -> None:
        self._runtime.set_rules(Rules.of(read_object(CodeRules, link.read_body(packet), "rules")))

    def _on_part(self, part: ToolPart, packet: link.Packet) -> None:
        self._session_tools.take_part(part, view(packet))

    def _on_ship(self, ship: ShipTools, packet: link.Packet) -> None:
        answer, body = self._session_tools.make(ship, packet)
        self._process.end_forks()
        self._streams.settle()  # output of the tools' own code belongs to no program
        self._send(answer, body)

    def _on_savepoint(self, request: TakeSavepoint, packet: link.Packet) -> None:
        from . import branch, savepoint, workspace_copies  # not at the start: most sessions have none

        if self._file_cache is None:
            self._file_cache = workspace_copies.WorkspaceCopies(self._config.workspace)
        if request.whole:
            self._branch = branch.Branch(self._runtime.main.__dict__, self._runtime.guarded, self._file_cache)
        parts = savepoint.Parts(self._sock, self._inbox, self._executions, self._streams, self._process)
        self._keeps_link = True
        try:
            answer = savepoint.take(request, packet, parts, self._file_cache)
        finally:
            self._keeps_link = False
            packet.close_fds()
        self._send(*answer)

    def _on_branch(self, message: LinkMessage, _packet: link.Packet) -> None:
        assert self._branch is not None, "a branch without its copy"
        answer = self._branch.answer(message)
        self._process.end_forks()
        self._streams.settle()  # output of values' own code belongs to no program
        self._send(*answer)

    def _on_find(self, _command: FindModules, packet: link.Packet) -> None:
        """Reports which modules the image lacks, before any program has run."""
        names = read_texts(link.read_body(packet), VARIABLES_NAMED_MAX, MAX_NAME_CHARS, "modules")
        self._send(Answered(ok=True), dumps(missing_modules(names)))
