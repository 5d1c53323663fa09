"""The first process of a double's sandbox: makes it look like a small virtual machine, then does what its server asks.

It is started by bubblewrap as the host's root, in namespaces that see nothing of the host but read-only directories.
That is not yet what a virtual machine's root is: that one may mount, unshare and change user, and is nobody outside.
So a second set of namespaces is made inside, with a user namespace in which 0 to 65535 are host users without rights:

    bubblewrap's pid 1 (host's root, waits)  ->  a fork of it (unshares, waits)  ->  pid 1 of the machine: this loop

The loop speaks with the server over one socket pair: each frame is four bytes of length and a JSON object. A request has
an `id`, and its answer the same with `ok` or `error`; what a command writes, and its end, come as events with its `pid`.
One thread, nothing blocks: input that a command does not read waits here, and a command whose output the server has not
acknowledged is not read until it has.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import errno
import fcntl
import grp
import json
import os
import pwd
import selectors
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import termios
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MNT_DETACH = 2
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40

IDS = 65_536
NEW_ROOT = "/machine"
FRAME_BYTES_MAX = 8 * 2**20
OUTPUT_BYTES = 32_768  # of one event
UNACKNOWLEDGED_MAX = 64  # events of one command
FILE_PIECE_BYTES = 256 * 1024
ENTRIES_MAX = 10_000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    arguments = (source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode())
    _check(_libc.mount(*arguments), f"mount {kind or source} at {target}")


# ---------------------------------------------------------------------------------------------------------------------
# Becoming a machine


def become_machine(config: dict[str, Any]) -> None:
    """Returns in the machine's first process only; the two on the way end with it, with its status."""
    # Bubblewrap's own would have parts of it covered, and then no other may be mounted further inside.
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    ready_read, ready_write = os.pipe()
    mapped_read, mapped_write = os.pipe()
    child = os.fork()
    if child:
        os.close(config["socket"])
        os.read(ready_read, 1)
        base = config["first_id"]
        for kind in ("uid_map", "gid_map"):
            with open(f"/proc/{child}/{kind}", "w") as file:
                file.write(f"0 {base} {IDS}\n")
        os.write(mapped_write, b"m")
        _wait_and_exit(child)
    kinds = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWNET
    _check(_libc.unshare(kinds), "unshare")
    os.write(ready_write, b"r")
    os.read(mapped_read, 1)
    for fd in (ready_read, ready_write, mapped_read, mapped_write):
        os.close(fd)
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.setgroups([])
    child = os.fork()
    if child:
        os.close(config["socket"])
        _wait_and_exit(child)
    _make_root(config)
    socket.sethostname("e2b")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP | IFF_RUNNING))


def _wait_and_exit(child: int) -> None:
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _make_root(config: dict[str, Any]) -> None:
    """A file system that the machine's root may change as it likes, with the host's programs in it, read-only."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NODEV, f"mode=0755,size={config['disk_bytes']}")
    os.umask(0o022)
    for name in ("dev", "etc", "home/user", "opt", "proc", "root", "run", "srv", "tmp", "var/tmp", "usr"):
        os.makedirs(f"{NEW_ROOT}/{name}")
    for name in ("tmp", "var/tmp"):
        os.chmod(f"{NEW_ROOT}/{name}", 0o1777)
    for path in config["directories"]:
        os.makedirs(NEW_ROOT + path, exist_ok=True)
        _mount(path, NEW_ROOT + path, None, MS_BIND | MS_REC)
    for path, target in config["links"]:
        os.makedirs(os.path.dirname(NEW_ROOT + path), exist_ok=True)
        os.symlink(target, NEW_ROOT + path)
    for path, prefix in config["hidden"]:
        _hide(path, prefix)
    for name, text in config["etc"].items():
        with open(f"{NEW_ROOT}/etc/{name}", "w") as file:
            file.write(text)
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        with open(f"{NEW_ROOT}/dev/{name}", "w"):
            pass
        _mount(f"/dev/{name}", f"{NEW_ROOT}/dev/{name}", None, MS_BIND)
    for name in ("shm", "pts"):
        os.mkdir(f"{NEW_ROOT}/dev/{name}")
    _mount("tmpfs", f"{NEW_ROOT}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={config['disk_bytes']}")
    _mount("devpts", f"{NEW_ROOT}/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=0620")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{NEW_ROOT}/dev/{name}")
    _mount("proc", f"{NEW_ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.mkdir(f"{NEW_ROOT}/.old")
    _check(_libc.pivot_root(NEW_ROOT.encode(), f"{NEW_ROOT}/.old".encode()), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/.old", MNT_DETACH), "umount2")
    os.rmdir("/.old")
    home = pwd.getpwnam("user")
    os.chown("/home/user", home.pw_uid, home.pw_gid)


def _hide(path: str, prefix: str) -> None:
    """Makes a directory of programs one that lacks those whose name begins with `prefix`."""
    place = NEW_ROOT + path
    if not os.path.isdir(place):
        return
    kept = "/.programs" + path
    os.makedirs(NEW_ROOT + kept)
    _mount(path, NEW_ROOT + kept, None, MS_BIND | MS_REC)
    _mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for name in os.listdir(NEW_ROOT + kept):
        if not name.startswith(prefix):
            os.symlink(f"{kept}/{name}", f"{place}/{name}")


# ---------------------------------------------------------------------------------------------------------------------
# Doing what is asked


class Refused(Exception):
    """A request that can't be done; `code` is one of Connect's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class Command:
    pid: int
    popen: subprocess.Popen[bytes]
    config: dict[str, Any]
    outputs: dict[int, str]  # descriptor to the name of its stream
    stdin: int | None
    pty: int | None = None
    input: deque[tuple[int, memoryview]] = field(default_factory=deque)  # request, what is left of its data
    closing: bool = False  # once the input is written
    unacknowledged: int = 0
    code: int | None = None

    @property
    def input_fd(self) -> int | None:
        return self.pty if self.pty is not None else self.stdin


class Runner:
    def __init__(self, connection: socket.socket, environment: dict[str, str]) -> None:
        self._connection = connection
        self._environment = environment
        self._selector = selectors.DefaultSelector()
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._commands: dict[int, Command] = {}
        self._files: dict[int, int] = {}
        self._operations: dict[str, Callable[[dict[str, Any]], Any]] = {
            name[4:]: getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }

    def run(self) -> None:
        """Serves until the server is gone."""
        wake_read, wake_write = socket.socketpair()
        wake_read.setblocking(False)
        wake_write.setblocking(False)
        signal.set_wakeup_fd(wake_write.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._connection.setblocking(False)
        self._selector.register(self._connection, selectors.EVENT_READ, self._on_connection)
        self._selector.register(wake_read, selectors.EVENT_READ, lambda _: self._on_child(wake_read))
        while True:
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
            self._selector.modify(self._connection, wanted, self._on_connection)
            for key, events in self._selector.select():
                if key.fd in self._selector.get_map():  # not unregistered by one that came before it
                    key.data(events)

    def _send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        self._outgoing += len(data).to_bytes(4, "big") + data

    def _on_connection(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with contextlib.suppress(BlockingIOError):
                del self._outgoing[: self._connection.send(self._outgoing)]
        if not events & selectors.EVENT_READ:
            return
        data = self._connection.recv(2**18)
        if not data:
            os._exit(0)  # pid 1: the kernel ends all the others
        self._incoming += data
        while len(self._incoming) >= 4:
            size = int.from_bytes(self._incoming[:4], "big")
            if size > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {size} bytes")
            if len(self._incoming) < 4 + size:
                return
            message = json.loads(bytes(self._incoming[4 : 4 + size]))
            del self._incoming[: 4 + size]
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = self._operations[message["op"]](message)
        except Refused as refusal:
            self._send({"id": message["id"], "error": [refusal.code, str(refusal)]})
        except OSError as error:
            self._send({"id": message["id"], "error": [_code_of(error), f"{error.strerror}: {error.filename}"]})
        else:
            if answer is not None:
                self._send({"id": message["id"], "ok": answer})

    # Commands

    def _do_start(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = _user(asked["user"])
        cwd = _resolve(asked.get("cwd") or user.pw_dir, user)
        if not os.path.isdir(cwd):
            raise Refused("invalid_argument", f"cwd '{cwd}' does not exist")
        environment = {"HOME": user.pw_dir, "USER": user.pw_name, "LOGNAME": user.pw_name}
        environment = {**self._environment, **environment, **asked["envs"]}
        size, pty, theirs = asked.get("pty"), None, None
        settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "process_group": 0}
        if size:
            pty, theirs = os.openpty()
            _resize(pty, size)
            settings = {"stdout": theirs, "stderr": theirs, "start_new_session": True, "preexec_fn": _take_terminal}
        try:
            popen = subprocess.Popen(
                [asked["cmd"], *asked["args"]],
                stdin=theirs if theirs is not None else subprocess.PIPE if asked["stdin"] else subprocess.DEVNULL,
                env=environment,
                cwd=cwd,
                user=user.pw_uid,
                group=user.pw_gid,
                extra_groups=[user.pw_gid],
                **settings,
            )
        except OSError as error:
            if pty is not None:
                os.close(pty)
            raise Refused("invalid_argument", f"error starting process: {error}") from error
        finally:
            if theirs is not None:
                os.close(theirs)
        if pty is not None:
            outputs, stdin = {pty: "pty"}, None
        else:
            assert popen.stdout is not None
            assert popen.stderr is not None
            outputs = {os.dup(popen.stdout.fileno()): "stdout", os.dup(popen.stderr.fileno()): "stderr"}
            stdin = os.dup(popen.stdin.fileno()) if popen.stdin else None
        for pipe in (popen.stdin, popen.stdout, popen.stderr):
            if pipe is not None:
                pipe.close()
        config = {name: asked.get(name) for name in ("cmd", "args", "envs", "cwd", "tag")}
        command = Command(popen.pid, popen, config, outputs, stdin, pty)
        self._commands[popen.pid] = command
        for fd in [*outputs, *([stdin] if stdin is not None else [])]:
            os.set_blocking(fd, False)
        self._watch(command)
        return {"pid": popen.pid}

    def _do_list(self, _: dict[str, Any]) -> list[dict[str, Any]]:
        alive = [command for command in self._commands.values() if command.code is None]
        return [{"pid": command.pid, **command.config} for command in alive]

    def _do_input(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        command = self._command(asked["pid"])
        if command.input_fd is None or command.closing:
            raise Refused("failed_precondition", "stdin not enabled or closed")
        data = base64.b64decode(asked["data"])
        if not data:
            return {}
        command.input.append((asked["id"], memoryview(data)))
        self._watch(command)
        return None  # answered when it is written

    def _do_close_input(self, asked: dict[str, Any]) -> dict[str, Any]:
        command = self._command(asked["pid"])
        if command.stdin is None or command.closing:
            raise Refused("failed_precondition", "stdin not enabled or closed")
        command.closing = True
        self._write_input(command)
        return {}

    def _do_signal(self, asked: dict[str, Any]) -> dict[str, Any]:
        command = self._command(asked["pid"])
        if command.code is not None:
            raise Refused("not_found", f"process with pid {asked['pid']} not found")
        os.kill(command.pid, asked["signal"])  # not reaped yet, so it can't be another's
        return {}

    def _do_resize(self, asked: dict[str, Any]) -> dict[str, Any]:
        command = self._command(asked["pid"])
        if command.pty is None:
            raise Refused("failed_precondition", "process is not a pty")
        _resize(command.pty, asked["size"])
        return {}

    def _do_ack(self, asked: dict[str, Any]) -> None:
        command = self._commands.get(asked["pid"])
        if command is not None:
            command.unacknowledged -= 1
            self._watch(command)

    def _command(self, pid: int) -> Command:
        command = self._commands.get(pid)
        if command is None:
            raise Refused("not_found", f"process with pid {pid} not found")
        return command

    def _watch(self, command: Command) -> None:
        """Makes the selector wait for what this command needs now."""
        reads = command.unacknowledged < UNACKNOWLEDGED_MAX
        wanted = dict.fromkeys(command.outputs, selectors.EVENT_READ if reads else 0)
        if command.input and command.input_fd is not None:
            wanted[command.input_fd] = wanted.get(command.input_fd, 0) | selectors.EVENT_WRITE
        known = {*command.outputs, *([command.input_fd] if command.input_fd is not None else [])}
        for fd in known:
            self._unregister(fd)
            if wanted.get(fd):
                self._selector.register(fd, wanted[fd], lambda events, fd=fd: self._on_command(command, fd, events))

    def _unregister(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def _on_command(self, command: Command, fd: int, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._write_input(command)
        if not events & selectors.EVENT_READ or fd not in command.outputs:
            return
        try:
            data = os.read(fd, OUTPUT_BYTES)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose other end is closed
            data = b""
        if data:
            self._send({"pid": command.pid, command.outputs[fd]: base64.b64encode(data).decode()})
            command.unacknowledged += 1
            self._watch(command)
            return
        self._unregister(fd)
        del command.outputs[fd]
        if fd != command.pty:
            os.close(fd)
        self._finish(command)

    def _write_input(self, command: Command) -> None:
        while command.input and command.input_fd is not None:
            number, data = command.input[0]
            try:
                written = os.write(command.input_fd, data)
            except BlockingIOError:
                return
            except OSError as error:
                command.input.popleft()
                self._send({"id": number, "error": ["internal", f"error writing to stdin: {error.strerror}"]})
                continue
            if written < len(data):
                command.input[0] = (number, data[written:])
                continue
            command.input.popleft()
            self._send({"id": number, "ok": {}})
        if command.closing and command.stdin is not None:
            self._unregister(command.stdin)
            os.close(command.stdin)
            command.stdin = None
        self._watch(command)

    def _on_child(self, wake: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while wake.recv(4096):
                pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            command = self._commands.get(pid)  # else an orphan, which only wants to be reaped
            if command is not None:
                command.code = command.popen.returncode = os.waitstatus_to_exitcode(status)
                self._finish(command)

    def _finish(self, command: Command) -> None:
        """Says its end once it has ended and all that it wrote was read: a child that holds its pipes holds its end."""
        if command.code is None or command.outputs:
            return
        for number, _ in command.input:
            self._send({"id": number, "error": ["not_found", f"process with pid {command.pid} not found"]})
        command.input.clear()
        for fd in (command.stdin, command.pty):
            if fd is not None:
                self._unregister(fd)
                os.close(fd)
        del self._commands[command.pid]
        exited = command.code >= 0
        status = f"exit status {command.code}" if exited else f"signal: {_signal_name(-command.code)}"
        end = {"exitCode": command.code if exited else -1, "exited": exited, "status": status}
        self._send({"pid": command.pid, "end": end})

    # Files

    def _do_open_read(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = _resolve(asked["path"], _user(asked["user"]))
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            os.close(fd)
            kind = "a directory" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise Refused("invalid_argument", f"path '{path}' is {kind}")
        self._files[fd] = fd
        return {"file": fd, "size": found.st_size}

    def _do_open_write(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = _user(asked["user"])
        path = _resolve(asked["path"], user)
        if os.path.isdir(path):
            raise Refused("invalid_argument", f"path is a directory: {path}")
        _make_directories(os.path.dirname(path), user)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        os.fchown(fd, user.pw_uid, user.pw_gid)
        self._files[fd] = fd
        return {"file": fd, "path": path, "name": os.path.basename(path), "type": "file"}

    def _do_read(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"data": base64.b64encode(os.read(self._files[asked["file"]], FILE_PIECE_BYTES)).decode()}

    def _do_write(self, asked: dict[str, Any]) -> dict[str, Any]:
        data = memoryview(base64.b64decode(asked["data"]))
        while data:
            data = data[os.write(self._files[asked["file"]], data) :]
        return {}

    def _do_close(self, asked: dict[str, Any]) -> dict[str, Any]:
        os.close(self._files.pop(asked["file"]))
        return {}

    def _do_stat(self, asked: dict[str, Any]) -> dict[str, Any]:
        return _entry(_resolve(asked["path"], _user(asked["user"])))

    def _do_list_dir(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        path = _resolve(asked["path"], _user(asked["user"]))
        if not os.path.isdir(path):
            _entry(path)  # or it does not exist
            raise Refused("invalid_argument", f"path is not a directory: {path}")
        found: list[dict[str, Any]] = []
        level = [path]
        for _ in range(max(1, asked["depth"])):
            inner = [os.path.join(place, name) for place in level for name in sorted(os.listdir(place))]
            found += [_entry(place) for place in inner[:ENTRIES_MAX]]
            level = [place for place in inner if os.path.isdir(place) and not os.path.islink(place)]
        return found[:ENTRIES_MAX]

    def _do_make_dir(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = _user(asked["user"])
        path = _resolve(asked["path"], user)
        if os.path.isdir(path):
            raise Refused("already_exists", f"directory already exists: {path}")
        if os.path.lexists(path):
            raise Refused("invalid_argument", f"path already exists but it is not a directory: {path}")
        _make_directories(path, user)
        return _entry(path)

    def _do_move(self, asked: dict[str, Any]) -> dict[str, Any]:
        user = _user(asked["user"])
        source, destination = _resolve(asked["source"], user), _resolve(asked["destination"], user)
        _make_directories(os.path.dirname(destination), user)
        os.rename(source, destination)
        return _entry(destination)

    def _do_remove(self, asked: dict[str, Any]) -> dict[str, Any]:
        path = _resolve(asked["path"], _user(asked["user"]))
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        return {}


def _user(name: str) -> pwd.struct_passwd:
    try:
        return pwd.getpwnam(name or "user")
    except KeyError:
        raise Refused("unauthenticated", f"error looking up user '{name}': user: unknown user {name}") from None


def _resolve(path: str, user: pwd.struct_passwd) -> str:
    if "\0" in path:
        raise Refused("invalid_argument", "path contains a null byte")
    if path == "~" or path.startswith("~/"):
        path = user.pw_dir + path[1:]
    return os.path.normpath(os.path.join(user.pw_dir, path))


def _make_directories(path: str, user: pwd.struct_passwd) -> None:
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        os.mkdir(directory)
        os.chown(directory, user.pw_uid, user.pw_gid)


def _entry(path: str) -> dict[str, Any]:
    own = os.lstat(path)
    is_link = stat.S_ISLNK(own.st_mode)
    kind = "FILE_TYPE_FILE"
    if is_link:
        kind = "FILE_TYPE_SYMLINK"
    elif stat.S_ISDIR(own.st_mode):
        kind = "FILE_TYPE_DIRECTORY"
    entry = {
        "name": os.path.basename(path) or "/",
        "type": kind,
        "path": path,
        "size": str(own.st_size),
        "mode": stat.S_IMODE(own.st_mode),
        "permissions": stat.filemode(own.st_mode),
        "owner": _name_of(pwd.getpwuid, own.st_uid),
        "group": _name_of(grp.getgrgid, own.st_gid),
        "modified_s": own.st_mtime,
    }
    if is_link:
        entry["symlinkTarget"] = os.readlink(path)
    return entry


def _name_of(look_up: Callable[[int], Any], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)


def _code_of(error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ESRCH):
        return "not_found"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "resource_exhausted"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP):
        return "invalid_argument"
    return "internal"


def _signal_name(number: int) -> str:
    names: dict[int, str] = {signal.SIGKILL: "killed", signal.SIGTERM: "terminated", signal.SIGINT: "interrupt"}
    return names.get(number) or f"signal {number}"


def _resize(pty: int, size: dict[str, Any]) -> None:
    fcntl.ioctl(pty, termios.TIOCSWINSZ, struct.pack("HHHH", size.get("rows", 24), size.get("cols", 80), 0, 0))


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def main() -> None:
    config = json.load(sys.stdin)
    become_machine(config)
    connection = socket.socket(fileno=config["socket"])
    connection.set_inheritable(False)
    runner = Runner(connection, config["environment"])
    runner._send({"ready": True})
    runner.run()


if __name__ == "__main__":
    main()
