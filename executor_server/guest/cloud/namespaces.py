"""`python3 GUEST namespaces CONFIG`: makes a sandbox inside a cloud machine, and starts the guest in it.

Theory of operation. The machine is a wall towards everything outside it. Inside, without this module, agent code would
run next to the cloud's own agent, which takes orders on localhost, and as a user that can become root. So the guest
gets the same inner walls as from the other backends: namespaces of its own (processes, mounts, network, ipc, names),
files that it can only read apart from memory of a bounded size, a user id that no list names, no capabilities and no
path to any, resource limits, and a filter of system calls.

Two processes do it. The outer one stays a process of the machine: it makes the directory, binds the socket, and forks.
The inner one is the first process of the new pid namespace; it takes away its own privileges, one step at a time
(`_steps`), and then executes the guest. The order is the security argument. Each step needs a privilege that a later
step removes, or hides something that a later step exposes, so each step's docstring says why it is not done earlier.
No step is optional: the first that fails ends the child, and with it, as the first process of its pid namespace,
everything in the sandbox.

Invariants:

- The command runs as root and exits with 0 only when the guest has reported that its modules are loaded. Otherwise it
  prints one line with the reason on standard error, exits with 1, and nothing of the sandbox is left.
- It may be repeated. A retry after a lost answer finds the directory; a guest that listens there counts as started, and
  one that does not is never started a second time, because its client would take the new guest for the old one.
- Of the machine, the guest keeps three descriptors: its listening socket, the pipe that it reports on, and a memory
  file of a fixed size as standard error. A namespace does not confine open descriptors, so all others are closed first.

CONFIG is a JSON object:

    socket       path where the guest listens, in a directory that this command makes, for root alone
    uid, gid     user and group of the code inside; in no list of users
    environment  all variables that it finds; PATH, where none is given, leads to this Python first
    processes, disk_bytes, shm_bytes, max_files    limits
    packages     the archive of an environment, and the version of the Python that it is for; or null
    seccomp      a classic BPF program as base64, or null
    guest        the guest's own configuration (main.py), without a socket
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import time

from ..wire import kernel, privileges, rlimits
from ..wire.lean import dumps, loads, socket
from ..wire.paths import GUEST_BOOT
from .config import Config
from .environment import unpack
from .root_files import build_root

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional

_STARTED, _FAILED = 0, 1

# Seconds for namespaces, mounts, and an interpreter that imports the guest, on a machine that has just woken up.
_START_TIME_S = 30.0
# Connections that wait to be accepted: one daemon connects, the rest is for its retries.
_BACKLOG = 8
_REASON_BYTES = 2000
_HOSTNAME = "sandbox"

# The largest number of 32 bits means "leave it unchanged" to setresuid(2).
_MAX_ID = 2**32 - 1

_STDERR_BYTES = 4096
_F_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004  # no more seals, neither shrink nor grow


class NamespaceFailure(Exception):
    """No sandbox could be made; the message is a clause with the reason."""


def main(arguments: list[str]) -> int:
    """Starts the sandbox; returns the exit code."""
    try:
        if os.geteuid() != 0:
            raise NamespaceFailure("it must be started by root")
        _start_once(_read_config(arguments))
    except NamespaceFailure as failure:
        sys.stderr.write(f"cannot make a sandbox here: {' '.join(str(failure).split())}\n")
        return _FAILED
    return _STARTED


def _read_config(arguments: list[str]) -> Config:
    """Reads CONFIG, which the daemon wrote. The ids are checked, since a sandbox run by root has no walls."""
    try:
        (text,) = arguments
        config = Config(loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NamespaceFailure(f"its configuration is wrong: {type(error).__name__}: {error}") from error
    if not (0 < config.uid < _MAX_ID and 0 < config.gid < _MAX_ID):
        raise NamespaceFailure("the user must be an ordinary one")
    return config


def _start_once(config: Config) -> None:
    """Starts the sandbox unless there is one.

    The lock on the parent directory makes a retry wait for a first command that is still starting: it would see the
    directory, and report that no guest listens.
    """
    os.umask(0o077)
    _close_inherited()
    parent = os.path.dirname(config.directory)
    try:
        os.makedirs(parent, exist_ok=True)
        lock = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.mkdir(config.directory)
    except FileExistsError:
        _expect_listening(config.socket)
        return
    except OSError as error:
        raise NamespaceFailure(f"no directory {config.directory}: {error.strerror}") from error
    try:
        _unpack(config)
        _start(config)
    except BaseException:
        _remove(config)
        raise


def _unpack(config: Config) -> None:
    if config.packages is not None:
        try:
            unpack(config.packages)
        except (OSError, ValueError) as error:
            raise NamespaceFailure(f"no environment: {error}") from error


def _close_inherited() -> None:
    """Closes descriptors that were left open: each would lead from the sandbox into the machine."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor that the list was read from


def _expect_listening(path: str) -> None:
    """Raises NamespaceFailure unless the guest of an earlier command listens. It is never started a second time."""
    with_guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with_guest.connect(path)
    except OSError as error:
        raise NamespaceFailure("there was one before, and its guest does not listen") from error
    finally:
        with_guest.close()


def _remove(config: Config) -> None:
    for remove, path in ((os.unlink, config.socket), (os.rmdir, config.directory)):
        try:
            remove(path)
        except OSError:
            pass  # not made yet; the error that led here says more than one of the clean-up


# -- outside ---------------------------------------------------------------------------------------------------------


def _start(config: Config) -> None:
    deadline = time.monotonic() + _START_TIME_S
    ready_read, ready_write = os.pipe()
    inside = _Inside(config, _listen(config.socket), ready_write, _open_stderr())
    try:
        kernel.unshare(kernel.CLONE_NEWPID)
    except OSError as error:
        raise NamespaceFailure(f"no pid namespace: {error.strerror}") from error
    child = os.fork()  # the first process of the new pid namespace
    if child == 0:
        _become_sandbox(inside)
    # Only the child may hold the write end: when it dies, the read below ends at once, and not at its deadline.
    os.close(ready_write)
    try:
        answer = _read_within(ready_read, deadline)
        if answer != b"1":
            problem = os.pread(inside.stderr, _STDERR_BYTES, 0).rstrip(b"\0").strip()
            raise NamespaceFailure(_reason(answer, problem))
    except BaseException:
        # The kernel kills a pid namespace with its first process, and unmounts what only its processes could see.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _listen(path: str) -> socket.socket:
    """Binds the guest's socket out here, in a directory that only root can enter.

    The guest inherits it: no file inside the sandbox leads to the supervisor, so agent code can't connect to it.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise NamespaceFailure(f"no socket {path}: {error.strerror or error}") from error
    return listener


def _open_stderr() -> int:
    """Makes the guest's standard error: a memory file of a fixed size.

    It outlives this command, which a pipe would not, and the seals keep a guest that writes without end from filling
    the machine's memory.
    """
    fd = os.memfd_create("stderr", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, _STDERR_BYTES)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def _read_within(fd: int, deadline: float) -> Optional[bytes]:
    """Reads the sandbox's answer: b"1" when it has started, a reason, or b"" when it has ended; None without one."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    return os.read(fd, _REASON_BYTES) if ready else None


def _reason(answer: Optional[bytes], problem: bytes) -> str:
    if answer is None:
        return f"the guest does not start within {_START_TIME_S:g} s"
    # The last line of a traceback names the error.
    return (answer or problem.rpartition(b"\n")[2] or b"the guest ended at once").decode("utf-8", "backslashreplace")


# -- inside ----------------------------------------------------------------------------------------------------------


class _Inside:
    """Everything that the child takes with it: the configuration, and three descriptors."""

    __slots__ = ("config", "listener", "ready", "stderr")

    def __init__(self, config: Config, listener: socket.socket, ready: int, stderr: int) -> None:
        self.config = config
        self.listener = listener
        self.ready = ready
        self.stderr = stderr


def _become_sandbox(inside: _Inside) -> None:
    """In the child: builds the walls around itself, then becomes the guest. Does not return.

    `os._exit` in any case: an exception that unwound into the parent's code would run its clean-up, as root, twice.
    """
    try:
        for what, step in _steps(inside.config):
            try:
                step(inside)
            except (OSError, ValueError) as error:
                os.write(inside.ready, f"cannot {what}: {error}".encode()[:_REASON_BYTES])
                return
    finally:
        os._exit(1)


def _steps(config: Config) -> list[tuple[str, Callable[[_Inside], None]]]:
    """Lists the steps in their order, each with the words for an error: "cannot … "."""
    return [
        ("leave its command", _leave_command),
        ("make namespaces", _make_namespaces),
        ("put its files together", _build_files),
        ("set its name", _set_name),
        ("bring loopback up", _bring_loopback_up),
        ("limit its resources", _limit_resources),
        (f"become user {config.uid}", _become_user),
        ("filter its system calls", _filter_system_calls),
        (f"run {sys.executable}", _run_guest),
    ]


def _leave_command(inside: _Inside) -> None:
    """Leaves the command's session and its streams.

    First of all: the cloud's agent may kill the command's process group when the command ends, and the sandbox must
    not die with it. It counts a command as running while a process holds its streams, so they are replaced. Not before
    the fork: the parent reports a failure on its own standard error.
    """
    os.setsid()
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd, kept in ((0, null), (1, null), (2, inside.stderr)):
        os.dup2(kept, fd)


def _make_namespaces(_inside: _Inside) -> None:
    """Enters new namespaces for mounts, ipc, names, network and control groups.

    Before anything is mounted or configured: earlier, the calls that follow would change the machine.
    """
    kernel.unshare(kernel.SANDBOX_NAMESPACES)


def _build_files(inside: _Inside) -> None:
    """Makes the root that the sandbox sees.

    In the new mount namespace, or it would replace the machine's. By a process of the new pid namespace, since /proc
    shows the processes of the namespace of its mounter. As root, with CAP_SYS_ADMIN, so before `_become_user`.
    Afterwards no path leads to a file of the machine that is not shown on purpose.
    """
    packages = inside.config.packages
    environment = None if packages is None else packages.directory
    build_root(inside.config.directory, sys.argv[0], inside.config.sizes, environment)


def _set_name(_inside: _Inside) -> None:
    """Names the host. In its own UTS namespace by now: one step earlier it would rename the machine."""
    socket.sethostname(_HOSTNAME)


def _bring_loopback_up(_inside: _Inside) -> None:
    """Brings up loopback, the only device of the new network namespace.

    127.0.0.1 is the sandbox's own from `_make_namespaces` on. The cloud's agent listens on the machine's loopback, a
    different device. Before `_become_user`, since it needs CAP_NET_ADMIN.
    """
    kernel.bring_up_loopback()


def _limit_resources(inside: _Inside) -> None:
    """Sets the resource limits, hard and soft.

    After the root is built, since RLIMIT_FSIZE would bound what is written for it. Before `_become_user`: a limit set
    after it would leave a moment without one. RLIMIT_NPROC counts the processes of the user; root is exempt from it.
    """
    for name, value in {
        **rlimits.FIXED,
        "fsize": inside.config.sizes.disk_bytes,
        "nproc": inside.config.processes,
    }.items():
        rlimits.limit(rlimits.kind(name), value)


def _become_user(inside: _Inside) -> None:
    """Gives up root for good, and the workspace first; after all that needs it. The order inside is fixed, too.

    1. The bounding set needs CAP_SETPCAP, which the change of user takes away. With it empty, no program with
       file capabilities gives them back.
    2. Groups need CAP_SETGID: before the user. Root's supplementary groups would open the machine's files to the guest.
    3. Real, effective and saved ids at once: a saved uid of 0 would be a path back (setuid(2)).
    4. The kernel clears the permitted, effective and ambient sets when the last uid of 0 goes, and keeps the
       inheritable set, which is cleared here.
    5. No new privileges: setuid programs of the read-only root run as this user.
    """
    config = inside.config
    os.chown("/workspace", config.uid, config.gid)
    privileges.drop_bounding_set()
    os.setgroups([])
    os.setresgid(config.gid, config.gid, config.gid)
    os.setresuid(config.uid, config.uid, config.uid)
    privileges.drop_capabilities()
    privileges.gain_no_privileges()


def _filter_system_calls(inside: _Inside) -> None:
    """Loads the filter of system calls.

    After the steps above, which make calls that it refuses (unshare, mount, pivot_root), and after
    `gain_no_privileges`: without that the kernel demands CAP_SYS_ADMIN, since a filter could confuse a setuid program.
    """
    if inside.config.seccomp is not None:
        privileges.filter_system_calls(inside.config.seccomp)


def _run_guest(inside: _Inside) -> None:
    """Executes the guest as a new program, last.

    Nothing of root's memory is in it: a fork without exec would keep the configuration and root's heap where agent code
    of a child could find them. /proc/1/environ then shows what the sandbox may know and no more. The two descriptors
    become inheritable only here, so no earlier step could leak them into a program.
    """
    os.chdir("/workspace")
    for fd in (inside.listener.fileno(), inside.ready):
        os.set_inheritable(fd, True)
    guest = dumps({**inside.config.guest, "listen_fd": inside.listener.fileno()}).decode()
    command = [sys.executable, "-I", "-S", "-c", GUEST_BOOT, guest, str(inside.ready)]
    path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
    os.execve(sys.executable, command, {"PATH": path, **inside.config.environment})
