"""Starts a guest: `boot` with the arguments CONFIG READY_FD, where CONFIG is a JSON object (see `read_config`).

The order matters. The guest first becomes the unprivileged user, before any other code can run with more rights; then
undumpable, because a change of the user would reset that flag; then it ignores signals; then it serves.
"""

from __future__ import annotations

import os
import sys

from .supervisor.config import Config, Programs
from .supervisor.supervisor import Supervisor
from .wire import libc
from .wire.lean import loads, signal, socket

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional


_GIT_IDENTITY = "[user]\n\tname = sandbox\n\temail = sandbox@localhost\n"


def boot() -> None:
    """Reports on READY_FD, unless it is -1, that the guest's modules are loaded; then runs the supervisor."""
    ready_fd = int(sys.argv.pop())
    if ready_fd >= 0:
        os.write(ready_fd, b"1")
        os.close(ready_fd)
    main()


def main() -> None:
    """Runs the supervisor, and exits with it."""
    if os.getpid() != 1:
        # The supervisor kills all processes but itself. Outside a pid namespace of its own, it would kill the host's.
        raise SystemExit("the guest only runs as the first process of a pid namespace")
    values = loads(sys.argv[1])
    _drop_to(values.get("drop_to"))
    _make_undumpable()
    serve(values)


def serve(values: dict[str, Any], on_serving: Callable[[], None] = lambda: None) -> None:
    """Runs the supervisor in an unprivileged, undumpable process, and exits with its code.

    `on_serving` is called once the supervisor is complete, before it forks.
    """
    _ignore_signals()
    os.umask(0o022)
    config = read_config(values)
    os.chdir(config.workspace)
    _write_git_identity()
    supervisor = Supervisor(config, _listener(values), Programs(_load, _interpreter, _checker))
    on_serving()
    os._exit(supervisor.serve())


def _write_git_identity() -> None:
    """Configures an author for git, in the file that `git config --global` changes; repositories can override it."""
    directory = os.path.join(os.environ.get("XDG_CONFIG_HOME", "/tmp/.config"), "git")
    try:
        os.makedirs(directory, exist_ok=True)
        with open(os.path.join(directory, "config"), "x") as file:
            file.write(_GIT_IDENTITY)
    except OSError:
        return  # the disk is full, or the image is the author


def read_config(values: dict[str, Any]) -> Config:
    """Returns the configuration from the command line, which the backend of the same version wrote."""
    return Config(
        token_hash=values["token_hash"],
        workspace=values["workspace"],
        orphan_time_s=float(values["orphan_time_s"]),
        memory_bytes=int(values["memory_bytes"]),
        processes=int(values["processes"]),
        watch_memory=bool(values["watch_memory"]),
        preload=[str(name) for name in values["preload"]],
        mark=os.urandom(16).hex(),
        cpu_counter=_cpu_counter(values),
        egress_listener=_egress_listener(values),
        has_environment=bool(values.get("environment")),
    )


def _cpu_counter(values: dict[str, Any]) -> Optional[int]:
    """Returns the inherited descriptor of the control group's CPU time, if there is one."""
    if "cpu_fd" not in values:
        return None
    os.set_inheritable(values["cpu_fd"], False)
    return int(values["cpu_fd"])


def _egress_listener(values: dict[str, Any]) -> Optional[int]:
    """Makes the egress proxy's listener, if the sandbox may have a network, before any other process starts."""
    if not values.get("egress"):
        return None
    from .wire.egress_listener import make_listener

    return make_listener().detach()


def _listener(values: dict[str, Any]) -> socket.socket:
    """Returns the socket for the daemon's connections: inherited, or made at a path that the daemon sees."""
    if "listen_fd" in values:
        os.set_inheritable(values["listen_fd"], False)
        return socket.socket(fileno=values["listen_fd"])
    # Under another name first: the daemon connects as soon as this name exists, and the socket must listen by then.
    path = values["listen_path"]
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path + ".new")
    os.chmod(path + ".new", 0o777)  # the daemon may be another user; the directory restricts access
    listener.listen(values["backlog"])
    os.rename(path + ".new", path)
    return listener


def _drop_to(ids: Any) -> None:
    """Becomes the sandbox's user for good. The kernel drops all capabilities once no uid of the process is root."""
    if ids is not None:
        uid, gid = ids
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)


def _make_undumpable() -> None:
    """Prevents processes of the same user from tracing this one, and from reading its memory and descriptors."""
    if libc.function("prctl")(libc.PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError("prctl(PR_SET_DUMPABLE) failed")


def _ignore_signals() -> None:
    """Ignores signals. From inside, pid 1 gets only signals that it handles; SIGKILL from outside works."""
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)


def _load() -> None:
    from .interpreter.inherited import defer_fork_handlers

    defer_fork_handlers()
    import gc
    import site  # noqa: F401 - each interpreter needs it (inherited.py)

    from .checks import checker_process
    from .interpreter import interpreter  # noqa: F401

    checker_process.prepare()  # here, so that children share what it makes
    gc.freeze()  # the collector would write to objects, and so unshare their pages


def _interpreter(sock: socket.socket, config: Config, preload: list[str]) -> None:
    from .interpreter import session_variables
    from .interpreter.interpreter import interpreter_main

    if session_variables.need_new_process(config.variables):
        session_variables.execute(sock, config, preload)
    interpreter_main(sock, config, preload)


def interpret() -> None:
    """Runs the interpreter in a newly executed process; see interpreter/session_variables.py."""
    from .interpreter import interpreter, session_variables

    sock, values = session_variables.executed()
    config = Config(token_hash="", orphan_time_s=0.0, preload=[], **values["config"])
    config.variables = values["variables"]
    interpreter.interpreter_main(sock, config, values["modules"])


def _checker(sock: socket.socket, config: Config) -> None:
    from .checks.checker_process import checker_main

    checker_main(sock, config)
