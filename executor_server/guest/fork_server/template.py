"""The template process: a process that has imported what interpreters need, and forks sandboxes.

It serves the daemon's requests one after the other. A request is a number and one descriptor, the forked process's own
socket to the daemon. This process never reads from that socket, so what goes over it, the session's configuration with
the hash of its token above all, is never in a memory that later sandboxes inherit.

Invariants:

- It runs no agent code, and reads nothing that agent code wrote.
- It has one thread when it forks, and those of libraries that do without them in a fork (native_threads.py): another
  one's locks would stay locked in the child for ever. Other threads are a reason not to serve at all.
- It has no memory that its forks could write to together: such memory is another reason not to serve.
- It forks into a new pid namespace and returns to its own at once. If it can't return it ends: the next fork would be
  the second process of that sandbox's namespace, next to agent code.
- Its objects are frozen: the garbage collector would write to them in each child, and so end the sharing of pages.
"""

from __future__ import annotations

import gc
import os
import select

from ..wire import kernel, native_threads, privileges
from ..wire.fork_server_messages import FAILED, READY, REFUSED, TEMPLATE_NAME
from ..wire.lean import dumps, passed_descriptors, signal, socket
from . import forked_sandbox
from .memory import take_arenas, use_huge_pages
from .modules import import_modules
from .report import namespaces

# Bytes of a request, and of the control data that brings its descriptor.
_REQUEST_BYTES = 32
_CONTROL_BYTES = 64
_LOOK_S = 60.0
# Runs of a piece of code until Python has specialized it.
_REPETITIONS = 20
# Arenas, of 1 MiB each, that the usual libraries and the guest's own modules take.
_ARENAS, _ARENAS_WITHOUT = 44, 10


def serve(requests: socket.socket, modules: list[str]) -> None:
    """Imports the modules, then serves until the daemon closes the socket. Does not return."""
    privileges.name_process(TEMPLATE_NAME)
    try:
        arenas = take_arenas(_ARENAS if modules else _ARENAS_WITHOUT)
        _load()  # before the modules, so that what each child uses lies together
        imported = import_modules(modules)
        unfit = _unfit()
        if unfit:
            requests.send(REFUSED + unfit.encode())
            os._exit(1)
        # The change of user in a sandbox is made by its own process; this one only keeps the rights for it.
        privileges.hide_memory()
        del arenas
        gc.collect()
        gc.freeze()
        use_huge_pages()
        requests.send(READY + dumps({"modules": imported, "namespaces": namespaces()}))
    except OSError:
        os._exit(1)  # the daemon has gone
    TemplateProcess(requests).serve()
    os._exit(0)


def _load() -> None:
    """Imports the guest's own modules, those of the interpreter and the checker too."""
    from ..interpreter.inherited import defer_fork_handlers

    defer_fork_handlers()
    from .. import main  # noqa: F401
    from ..checks import checker_process
    from ..interpreter import interpreter  # noqa: F401

    checker_process.prepare(checker_process.PROGRAM, _REPETITIONS)


def _unfit() -> str:
    """Returns what imported modules have made that a fork would break or share; empty when there is nothing."""
    before = native_threads.switches()
    child = os.fork()  # ends the threads that know of forks
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    lost = native_threads.lost(before, renewed=False)
    if lost:
        return f"threads of imported modules would be missing in a fork: {lost}"
    with open("/proc/self/maps", "rb") as file:
        shared = sum(line.split(b" ", 2)[1][1:] in (b"w-s", b"wxs") for line in file)
    return f"imported modules have memory ({shared} maps) that all forks could write to" if shared else ""


class TemplateProcess:
    """Forks on request, and reports how its children ended."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
        self._children: dict[int, bytes] = {}  # number of the request, by process id
        self._wakeup_read, self._wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._wakeup_read, select.POLLIN)
        poll.register(self._requests.fileno(), select.POLLIN)
        while True:
            events = dict(poll.poll(_LOOK_S * 1000))
            if self._wakeup_read in events:
                os.read(self._wakeup_read, 4096)
            self._reap()
            if self._requests.fileno() in events and not self._next_request():
                return

    def _next_request(self) -> bool:
        """Serves a request; false when the daemon has closed the socket."""
        data, control, _, _ = self._requests.recvmsg(_REQUEST_BYTES, _CONTROL_BYTES)
        if not data:
            return False
        fds = passed_descriptors(control)
        try:
            if len(fds) == 1:
                self._fork(data, fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _fork(self, number: bytes, control: int) -> None:
        try:
            kernel.unshare(kernel.CLONE_NEWPID)
        except OSError as error:  # the limit of pid namespaces, or no memory
            _answer(control, FAILED + f"no pid namespace: {error.strerror}".encode())
            return
        try:
            child = os.fork()
        except OSError as error:  # the process table is full, or no memory
            child = -1
            _answer(control, FAILED + f"no process: {error.strerror}".encode())
        if child == 0:
            forked_sandbox.become(control)
        try:
            kernel.enter_namespace(self._own_pids, kernel.CLONE_NEWPID)
        except OSError:
            os._exit(1)
        if child > 0:
            self._children[child] = number

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            number = self._children.pop(pid, None)
            if number is not None:
                try:
                    self._requests.send(b"%s %d" % (number, status))
                except OSError:
                    pass  # the daemon has gone, or reads too slowly: it does without


def _answer(control: int, packet: bytes) -> None:
    try:
        os.write(control, packet)
    except OSError:
        pass  # the daemon has given up
