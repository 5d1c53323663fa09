"""The first process of a fork server: starts the template process, reaps orphaned processes, and ends last.

It is separate from the template process because the kernel ends a pid namespace with its first process. If the template
process crashes, or the daemon gives it up, its sandboxes must live on; they become children of this process.

It needs no orphan time. When the daemon dies, a pipe that the daemon held open closes. This process then kills the
template process, even a hanging one, since no other daemon can use it. It ends with the last sandbox; each sandbox ends
after its own orphan time, or the next daemon finds it. So a fork server without sandboxes ends at once with its daemon.
"""

from __future__ import annotations

import os
import select
import sys

from ..wire import privileges
from ..wire.fork_server_messages import INIT, INIT_NAME
from ..wire.lean import signal, socket

# Seconds until a wait ends by itself, for a signal that came just before it.
_LOOK_S = 60.0


def main() -> None:
    """Runs as the first process of the pid namespace, with the arguments SOCKET LIFELINE MODULE…"""
    if os.getpid() != 1:
        raise SystemExit("it only runs as the first process of a pid namespace")
    privileges.name_process(INIT_NAME)
    # Nothing that a module does when the template process imports it may reach this process, which has the same user.
    privileges.hide_memory()
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)
    requests, lifeline = int(sys.argv[1]), int(sys.argv[2])
    for fd in (requests, lifeline):
        os.set_inheritable(fd, False)
    with_daemon = socket.socket(fileno=requests)
    with_daemon.send(INIT)
    template = os.fork()
    if template == 0:
        os.close(lifeline)
        try:
            from .template import serve

            serve(with_daemon, sys.argv[3:])
        finally:
            os._exit(1)
    with_daemon.close()  # or the daemon would not see the template process's end
    _watch(template, lifeline)
    os._exit(0)


def _watch(template: int, lifeline: int) -> None:
    """Returns when no process is left."""
    wakeup_read, wakeup_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    poll = select.poll()
    poll.register(wakeup_read, select.POLLIN)
    poll.register(lifeline, 0)  # when the other end is closed: POLLHUP, which is reported without a request
    daemon_lives = True
    while _reap():
        events = dict(poll.poll(_LOOK_S * 1000))
        if wakeup_read in events:
            os.read(wakeup_read, 4096)
        if daemon_lives and lifeline in events:
            daemon_lives = False
            poll.unregister(lifeline)
            try:
                os.kill(template, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended, and was reaped; no other process has its id, as all are children of this one


def _reap() -> bool:
    """Reaps all that has ended; false when there is no child any more."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
