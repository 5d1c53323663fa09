"""`python3 GUEST nest CONFIG`: makes a sandbox inside of a machine of the cloud, and starts the guest in it.

Such a machine is a wall to everybody outside of it. But inside, code that an agent wrote would be beside the cloud's
own agent, which takes orders on localhost, and a user who may become root. So the guest gets the same inner walls as
elsewhere: namespaces of its own (processes, mounts, network, ipc, names), files that it can only read but for memory of
a bounded size, a user that nobody else is, no capabilities, no way to gain any, limits, and a filter of system calls.

It runs as root, and ends when the guest listens: exit code 0. Else it says why in one line on standard error, ends with
1, and nothing of the sandbox is left. A guest that listens already counts as started, so the command may be repeated.

CONFIG is a JSON object:

    socket       where the guest is to listen: a path in a directory that nest makes, for root alone
    uid, gid     whom the code inside runs as; in no list of users
    environment  all variables that it finds; PATH, where none is given, leads to this Python first
    processes, disk_bytes, shm_bytes, max_files    limits
    seccomp      a classic BPF program as base64, or null
    guest        the guest's own configuration (main.py), without a socket
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import sys
import time
from binascii import a2b_base64
from struct import pack

from . import kernel
from .lean import dumps, loads, socket
from .nest_root import Sizes, build_root
from .place import GUEST_BOOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

_STARTED, _FAILED = 0, 1

# For the namespaces and the mounts, and for an interpreter to start and import the guest, on a machine that wakes up.
_START_TIME_S = 30.0
_BACKLOG = 8  # one daemon connects; the rest is room for its retries
_REASON_BYTES = 2000
_HOSTNAME = "sandbox"

# The last 32-bit number means "leave it as it is" to the kernel.
_MAX_ID = 2**32 - 1
_OPEN_FILES = 4096
_LOCKED_MEMORY_BYTES = 65_536

# Not the pid namespace: that one begins with the next child, and so is made before this process is.
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNET | kernel.CLONE_NEWCGROUP
)
# linux/sockios.h and linux/if.h
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1

_COMPLAINT_BYTES = 4096
_F_ADD_SEALS = 1033
_SEALS = 0x0001 | 0x0002 | 0x0004  # no more seals, neither shrink nor grow


class NestFailure(Exception):
    """Why there is no sandbox, in a clause."""


class _Config:
    def __init__(self, values: dict[str, Any]) -> None:
        self.socket = str(values["socket"])
        self.uid = int(values["uid"])
        self.gid = int(values["gid"])
        self.environment = {str(name): str(value) for name, value in values["environment"].items()}
        self.processes = int(values["processes"])
        self.sizes = Sizes(int(values["disk_bytes"]), int(values["shm_bytes"]), int(values["max_files"]))
        self.seccomp = a2b_base64(values["seccomp"]) if values["seccomp"] is not None else None
        self.guest: dict[str, Any] = values["guest"]
        self.directory = os.path.dirname(self.socket)


def main(arguments: list[str]) -> int:
    """Starts the sandbox; the exit code."""
    try:
        if os.geteuid() != 0:
            raise NestFailure("it must be started by root")
        _start_once(_read_config(arguments))
    except NestFailure as failure:
        sys.stderr.write(f"cannot make a sandbox here: {' '.join(str(failure).split())}\n")
        return _FAILED
    return _STARTED


def _read_config(arguments: list[str]) -> _Config:
    """What the daemon of the same version wrote; but a sandbox whose user is root would be none."""
    try:
        (text,) = arguments
        config = _Config(loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NestFailure(f"its configuration is wrong: {type(error).__name__}: {error}") from error
    if not (0 < config.uid < _MAX_ID and 0 < config.gid < _MAX_ID):
        raise NestFailure("the user must be an ordinary one")
    return config


def _start_once(config: _Config) -> None:
    """One at a time: who comes second finds what the first one has made."""
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
        raise NestFailure(f"no directory {config.directory}: {error.strerror}") from error
    try:
        _start(config)
    except BaseException:
        _remove(config)
        raise


def _close_inherited() -> None:
    """Of whoever started this: a namespace is no wall to a descriptor."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that the list was read from


def _expect_listening(path: str) -> None:
    """A guest that is gone is not started again: whoever talked to it would take the new one for it."""
    with_guest = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with_guest.connect(path)
    except OSError as error:
        raise NestFailure("there was one before, and its guest does not listen") from error
    finally:
        with_guest.close()


def _remove(config: _Config) -> None:
    for remove, path in ((os.unlink, config.socket), (os.rmdir, config.directory)):
        try:
            remove(path)
        except OSError:
            pass  # not made yet; and what can't be removed says less than what went wrong before


# -- outside ---------------------------------------------------------------------------------------------------------


def _start(config: _Config) -> None:
    deadline = time.monotonic() + _START_TIME_S
    said, say = os.pipe()
    complaints = _open_complaints()
    listener = _listen(config.socket)
    try:
        kernel.unshare(kernel.CLONE_NEWPID)  # of the next child, which so is the first process there
    except OSError as error:
        raise NestFailure(f"no pid namespace: {error.strerror}") from error
    child = os.fork()
    if child == 0:
        _become_sandbox(config, listener, say, complaints)
    os.close(say)
    try:
        answer = _read_within(said, deadline)
        if answer != b"1":
            words = os.pread(complaints, _COMPLAINT_BYTES, 0).rstrip(b"\0").strip()
            raise NestFailure(_reason(answer, words))
    except BaseException:
        # With the first process goes all of its pid namespace, and with the last one the mounts that only they had.
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def _listen(path: str) -> socket.socket:
    """Bound out here, in a directory that only root can enter: inside, no file leads to the supervisor."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        raise NestFailure(f"no socket {path}: {error.strerror or error}") from error
    return listener


def _open_complaints() -> int:
    """What the guest writes to standard error: a file in memory of a fixed size, which outlives us and never fills."""
    fd = os.memfd_create("complaints", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(fd, _COMPLAINT_BYTES)
    fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    return fd


def _read_within(fd: int, deadline: float) -> Optional[bytes]:
    """What the sandbox says of its start: b"1", a reason, or b"" when it has ended; None when it says nothing."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    return os.read(fd, _REASON_BYTES) if ready else None


def _reason(answer: Optional[bytes], words: bytes) -> str:
    if answer is None:
        return f"the guest does not start within {_START_TIME_S:g} s"
    # The last line of a traceback says what went wrong.
    return (answer or words.rpartition(b"\n")[2] or b"the guest ended at once").decode("utf-8", "backslashreplace")


# -- inside ----------------------------------------------------------------------------------------------------------


def _become_sandbox(config: _Config, listener: socket.socket, say: int, complaints: int) -> None:
    """In the child: builds the walls around itself, then becomes the guest. Does not return."""
    try:
        for what, step in _steps(config, listener, say, complaints):
            try:
                step()
            except (OSError, ValueError) as error:
                os.write(say, f"cannot {what}: {error}".encode()[:_REASON_BYTES])
                return
    finally:
        os._exit(1)


def _steps(config: _Config, listener: socket.socket, say: int, complaints: int) -> list[tuple[str, Callable[[], None]]]:
    """What is done in turn, each as root as long as it takes root."""

    def leave_command() -> None:
        # The command that we are of ends now, and its process group may be killed.
        os.setsid()
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        # Its streams must be let go of, or the command would never count as ended.
        for fd, kept in ((0, null), (1, null), (2, complaints)):
            os.dup2(kept, fd)

    def build_files() -> None:
        build_root(config.directory, sys.argv[0], config.sizes)

    def connect_to_itself() -> None:
        # Nothing but loopback is in the new network; what listens on the machine's own is on another one.
        with_kernel = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        fcntl.ioctl(with_kernel.fileno(), _SIOCSIFFLAGS, pack("16sh14x", b"lo", _IFF_UP))
        with_kernel.close()

    def limit() -> None:
        for what, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_FSIZE, config.sizes.disk_bytes),
            (resource.RLIMIT_MEMLOCK, _LOCKED_MEMORY_BYTES),
            (resource.RLIMIT_NPROC, config.processes),
        ):
            _, hard = resource.getrlimit(what)
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(what, (bound, bound))

    def become_user() -> None:
        # While there are capabilities to do it with, and before the user is changed, which takes them away.
        kernel.drop_bounding_set()
        os.setgroups([])
        os.setresgid(config.gid, config.gid, config.gid)
        os.setresuid(config.uid, config.uid, config.uid)
        # What is inheritable stays through a change of user.
        kernel.drop_capabilities()
        kernel.gain_no_privileges()

    def filter_calls() -> None:
        # After all that it refuses, and after no_new_privs, without which it takes root.
        if config.seccomp is not None:
            kernel.filter_system_calls(config.seccomp)

    def run_guest() -> None:
        # A new program: nothing of root's memory is in it, and /proc/1/environ holds what the sandbox may know.
        os.chdir("/workspace")
        for fd in (listener.fileno(), say):
            os.set_inheritable(fd, True)
        guest = dumps({**config.guest, "listen_fd": listener.fileno()}).decode()
        command = [sys.executable, "-I", "-S", "-c", GUEST_BOOT, guest, str(say)]
        path = f"{os.path.dirname(sys.executable)}:/usr/local/bin:/usr/bin:/bin"
        os.execve(sys.executable, command, {"PATH": path, **config.environment})

    return [
        ("leave its command", leave_command),
        ("make namespaces", lambda: kernel.unshare(_NAMESPACES)),
        ("put its files together", build_files),
        ("set its name", lambda: socket.sethostname(_HOSTNAME)),
        ("bring loopback up", connect_to_itself),
        ("limit its resources", limit),
        (f"become user {config.uid}", become_user),
        ("filter its system calls", filter_calls),
        (f"run {sys.executable}", run_guest),
    ]
