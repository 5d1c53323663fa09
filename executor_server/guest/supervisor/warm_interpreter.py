"""The warm interpreter: a second interpreter, which preloads modules.

It is forked when the first one has booted, and replaces it if that is still unused when the imports are done. Rules,
tools, and a search for modules do not count as use: the warm one gets them, too. As soon as the first one is used, an
unfinished warm one is ended. So no execution waits for the import of a module that it does not use, or is charged for
it, and a module that hangs or kills its process does no harm.
"""

from __future__ import annotations

import sys

from ..wire import link
from ..wire.frames import FrameError
from ..wire.lean import socket
from ..wire.link_messages import Booted, Importing, NotImported, message_of
from ..wire.loop import READ, Loop
from .child import Child, end_child, spawn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

    Receive = Callable[[Child, Callable[[link.Packet], None]], None]

# Characters of a module's name in the line on standard error.
_MAX_NAME_CHARS = 100


class WarmInterpreter:
    """Owns the process while there is one, and the list of modules worth another attempt.

    `program` runs in it; `receive` reads a message from it; `on_ready` gets the finished process with its last message.
    """

    def __init__(
        self,
        loop: Loop,
        modules: list[str],
        program: Callable[[socket.socket, list[str]], None],
        receive: Receive,
        on_ready: Callable[[Child, link.Packet], None],
    ) -> None:
        self._loop = loop
        self._modules = list(modules)
        self._program = program
        self._receive = receive
        self._on_ready = on_ready
        self.child: Optional[Child] = None  # the one that imports
        self._importing = ""

    @property
    def useful(self) -> bool:
        """True when there are modules to import ahead."""
        return bool(self._modules)

    def start(self) -> None:
        """Forks a warm interpreter, unless there is one or no module to import."""
        if self.child is not None or not self._modules:
            return
        self._importing = ""

        def target(sock: socket.socket) -> None:
            self._program(sock, self._modules)

        try:
            self.child = spawn(target)
        except OSError:
            self._modules = []  # no process is left for it
        else:
            self._loop.watch(self.child.sock.fileno(), READ, self._on_readable)

    def end(self) -> None:
        """Ends the warm interpreter, which has come too late."""
        child = self.forget()
        if child is not None:
            end_child(child)

    def forget(self) -> Optional[Child]:
        """Stops reading from the warm interpreter, which is dead or about to be killed."""
        child, self.child = self.child, None
        if child is not None:
            self._loop.watch(child.sock.fileno(), 0, None)
            child.close()
        return child

    def note_exit(self, pid: int) -> bool:
        """Returns true if the warm interpreter ended; drops the module that ended it."""
        if self.child is None or pid != self.child.pid:
            return False
        self._read_rest(self.child)
        self.forget()
        if self._importing in self._modules:
            self._leave_out(self._importing, "it took too long or ended the process")
        else:
            self._modules = []  # it ended before its first import
        return True

    def _read_rest(self, child: Child) -> None:
        """Reads the last messages of an ended warm interpreter, which may name the module that ended it.

        The process is often reaped before they are read. A message that all imports are done is ignored.
        """
        for _ in range(2 * len(self._modules)):
            try:
                packet = link.receive(child.sock, link.INLINE_BYTES)
            except (BlockingIOError, link.LinkClosed, FrameError):
                return
            try:
                if not isinstance(message_of(packet), Booted):
                    self._on_message(packet)
            except FrameError:
                return
            finally:
                packet.close()

    def _on_readable(self, _events: int) -> None:
        if self.child is not None:
            self._receive(self.child, self._on_message)

    def _on_message(self, packet: link.Packet) -> None:
        packet.close_fds()  # no message has any
        link.read_body(packet, link.INLINE_BYTES)
        message = message_of(packet)
        if isinstance(message, Importing):
            self._importing = message.name
        elif isinstance(message, NotImported):
            self._leave_out(message.name, message.why)
        elif isinstance(message, Booted):
            child, self.child = self.child, None
            assert child is not None
            self._on_ready(child, packet)
        else:
            raise FrameError(f"a message {message.kind!r} from a warm interpreter")

    def _leave_out(self, name: str, why: str) -> None:
        """Removes a module from the list, and logs that once on standard error."""
        if name in self._modules:
            self._modules.remove(name)
            sys.stderr.write(f"module {name[:_MAX_NAME_CHARS]} could not be preloaded: {why}\n")
            sys.stderr.flush()
