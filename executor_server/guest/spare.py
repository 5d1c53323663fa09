"""The spare: a second interpreter, in which the modules that are to be imported ahead are imported.

It is forked when the interpreter has booted, and takes its place if nobody has used that one by the time the spare is
done. Rules and tools that it is given, and the question which modules are there, do not count: the spare gets them too.
As soon as the interpreter is used, a spare that is not done is ended instead. So nobody ever waits for an import
that he did not ask for, none of it is measured with an execution, and a module that hangs or kills its process harms
nothing.
"""

from __future__ import annotations

import sys

from . import link
from .children import Child, end_child, spawn
from .frames import FrameError
from .lean import socket
from .loop import READ, Loop

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    Receive = Callable[[Child, Callable[[link.Message], None]], None]

# What is said of a module that cannot be imported ahead.
_MAX_NAME_CHARS = 100


class Spare:
    """Owns the spare while there is one, and knows which modules are worth another attempt.

    `program` runs in it; `receive` takes a message of it; `on_ready` is handed the spare when it is done, with what it
    said last.
    """

    def __init__(
        self,
        loop: Loop,
        modules: list[str],
        program: Callable[[socket.socket, list[str]], None],
        receive: Receive,
        on_ready: Callable[[Child, link.Message], None],
    ) -> None:
        self._loop = loop
        self._modules = list(modules)
        self._program = program
        self._receive = receive
        self._on_ready = on_ready
        self._child: Optional[Child] = None
        self._importing = ""

    @property
    def useful(self) -> bool:
        """Whether there is anything to import ahead."""
        return bool(self._modules)

    def start(self, abandon: Callable[[], None]) -> None:
        """Forks a spare, unless there is one or it could do nothing."""
        if self._child is not None or not self._modules:
            return
        self._importing = ""

        def target(sock: socket.socket) -> None:
            self._program(sock, self._modules)

        try:
            self._child = spawn(target, abandon)
        except OSError:
            self._modules = []  # no process is left for it
        else:
            self._loop.watch(self._child.sock.fileno(), READ, self._on_readable)

    def end(self) -> None:
        """Ends the spare if there is one: it would come too late."""
        child = self.forget()
        if child is not None:
            end_child(child)

    def forget(self) -> Optional[Child]:
        """Listens no more to the spare, which is dead or about to be killed."""
        child, self._child = self._child, None
        if child is not None:
            self._loop.watch(child.sock.fileno(), 0, None)
            child.close()
        return child

    def close(self) -> None:
        """In a forked child: closes what is the supervisor's."""
        if self._child is not None:
            self._child.close()

    def note_exit(self, pid: int) -> bool:
        """Whether that was the spare; then it died of a module, which is left out from here on."""
        if self._child is None or pid != self._child.pid:
            return False
        self._read_rest(self._child)
        self.forget()
        if self._importing in self._modules:
            self._leave_out(self._importing, "it took too long or ended the process")
        else:
            self._modules = []  # it does not come as far as that
        return True

    def _read_rest(self, child: Child) -> None:
        """Reads the last words of a spare that has died: the module that it died of may be among them.

        Its end is often known before they are read. That it was done is not believed any more.
        """
        for _ in range(2 * len(self._modules)):
            try:
                message = link.receive(child.sock, link.INLINE_BYTES)
            except (BlockingIOError, link.LinkClosed, FrameError):
                return
            try:
                if message.head.text("t", 32) != "booted":
                    self._on_message(message)
            except FrameError:
                return
            finally:
                message.close()

    def _on_readable(self, _events: int) -> None:
        if self._child is not None:
            self._receive(self._child, self._on_message)

    def _on_message(self, message: link.Message) -> None:
        message.close_fds()  # none belongs to any message
        link.read_body(message, link.INLINE_BYTES)
        kind = message.head.text("t", 32)
        if kind == "importing":
            self._importing = message.head.text("name", 4096)
        elif kind == "not_imported":
            self._leave_out(message.head.text("name", 4096), message.head.text("why", 64))
        elif kind == "booted":
            child, self._child = self._child, None
            assert child is not None
            self._on_ready(child, message)
        else:
            raise FrameError(f"an unknown message {kind!r}")

    def _leave_out(self, name: str, why: str) -> None:
        """Does not import a module ahead again, and says so, once."""
        if name in self._modules:
            self._modules.remove(name)
            sys.stderr.write(f"module {name[:_MAX_NAME_CHARS]} was not imported ahead: {why}\n")
            sys.stderr.flush()
