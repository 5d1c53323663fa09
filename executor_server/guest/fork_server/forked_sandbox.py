"""Turns a fork of the template process into a sandbox, and reports it to the daemon for verification before it serves.

Theory of operation. The process is the first one of a new pid namespace. Otherwise it still has the template process's
files, user and rights. It gives them up one step at a time, in the order of `_STEPS`. As in `cloud/namespaces.py`, the
order matters: each step needs a right that a later step drops, or hides something that a later step opens. No step is
optional. The first failure ends the process, and with it everything in the sandbox.

Three more rules hold throughout:

- Before the process does anything, the daemon knows it (`HERE`; the kernel attests its id) and has opened a handle to
  it. So the daemon can end it whatever goes wrong later.
- The first steps need no plan; they run while the daemon makes it.
- The process serves only on the daemon's command. The daemon first reads the report and writes the record, with which a
  later daemon finds the sandbox. If the daemon dies before that, its socket closes, which ends this process.

Agent code can't reach a sandbox during its creation: agent code lives in other pid namespaces, in which this process
has no id, and shares no file system in which anything of this process has a name.
"""

from __future__ import annotations

import os
import sys

from ..wire import kernel, privileges, rlimits
from ..wire.fork_server_messages import FAILED, HERE, MAX_PLAN_FDS, PACKET_BYTES, SERVE, SERVING
from ..wire.kernel import MS_BIND, MS_MOVE, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_RDONLY, MS_REMOUNT
from ..wire.lean import dumps, loads, passed_descriptors, signal, socket
from .report import report

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_DEVPTS_OPTIONS = "newinstance,ptmxmode=0666,mode=620,max=64"
# Limits on inotify, which the kernel also counts for the owner of the fork server's namespaces; and no namespaces below
# this one.
_OWN_MAXIMA = (("max_inotify_instances", b"16"), ("max_inotify_watches", b"8192"), ("max_user_namespaces", b"0"))
# An empty directory of the fork server's root, on which the sandbox's own is mounted later.
_EMPTY = "/workspace"
_READ_ONLY_IN_PROC = ("sys", "sysrq-trigger", "irq", "bus")
_REASON_BYTES = 2000


def become(control: int) -> None:
    """Becomes a sandbox according to the plan received over `control`, and serves. Does not return.

    Always ends with `os._exit`: an exception that unwound into the template process's code would serve its requests
    twice.
    """
    try:
        with_daemon = socket.socket(fileno=_only_descriptor(control))
        with_daemon.send(HERE)
        child = _Child(with_daemon)
        for what, step in _STEPS:
            try:
                step(child)
            except (OSError, ValueError, KeyError, TypeError) as error:
                with_daemon.send(FAILED + f"cannot {what}: {error}".encode()[:_REASON_BYTES])
                return
        with_daemon.send(dumps(report()))
        if with_daemon.recv(PACKET_BYTES) != SERVE:
            return
        from ..main import serve

        def on_serving() -> None:
            with_daemon.send(SERVING)
            with_daemon.close()

        serve(child.guest, on_serving)
    except OSError:
        return  # the daemon has gone
    finally:
        os._exit(1)


def _only_descriptor(control: int) -> int:
    """Leaves the template process's session, signals and descriptors; returns the socket's new number, 3.

    This comes first, before anything can fail or be read: with the template process's socket this process could request
    other forks, and its handle of the pid namespace leads out of this one.
    """
    signal.set_wakeup_fd(-1)
    os.setsid()
    moved = os.dup2(control, 3, inheritable=False) if control != 3 else 3
    kernel.close_descriptors_from(4)
    return moved


class _Child:
    """The plan and its descriptors, which the steps pass on."""

    def __init__(self, with_daemon: socket.socket) -> None:
        self.with_daemon = with_daemon
        self.plan: dict[str, Any] = {}
        self.fds: dict[str, int] = {}
        self.groups: list[int] = []
        self.settings = -1  # /proc/sys, while it is writable

    @property
    def guest(self) -> dict[str, Any]:
        return dict(self.plan["guest"], **{f"{name}_fd": fd for name, fd in self.fds.items() if name != "stderr"})


def _read_plan(child: _Child) -> None:
    """Reads the plan and its descriptors.

    They are standard error, the guest's listener, the counter of its CPU time, and the files for joining its control
    groups.
    """
    data, control, flags, _ = child.with_daemon.recvmsg(PACKET_BYTES, socket.CMSG_SPACE(4 * MAX_PLAN_FDS))
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise ValueError("a plan that is too large")
    fds = passed_descriptors(control)
    for fd in fds:
        os.set_inheritable(fd, False)
    child.plan = loads(data)
    names = [str(name) for name in child.plan["fds"]]
    if len(names) > len(fds):
        raise ValueError("descriptors are missing")
    child.fds = dict(zip(names, fds))
    child.groups = fds[len(names) :]


def _join_groups(child: _Child) -> None:
    """Joins the control groups, then enters a cgroup namespace, in which they are the top.

    This comes before it allocates memory or forks: earlier allocations, for namespaces and tables that are the same in
    every sandbox, are charged to the daemon. The daemon has opened the files, so no path of the host is needed, and the
    kernel checks the daemon's right to move the process, not this process's. They are closed, because a process that
    has them could leave its group.
    """
    for fd in child.groups:
        os.write(fd, b"0")
        os.close(fd)
    kernel.unshare(kernel.CLONE_NEWCGROUP)


def _take_streams(child: _Child) -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for number, fd in ((0, null), (1, null), (2, child.fds["stderr"])):
        os.dup2(fd, number, inheritable=True)
    os.close(null)
    os.close(child.fds.pop("stderr"))


def _make_namespaces(_child: _Child) -> None:
    """Enters new namespaces, before any mount or configuration, which would change the fork server's."""
    kernel.unshare(kernel.SANDBOX_NAMESPACES & ~kernel.CLONE_NEWCGROUP)


def _bring_up(_child: _Child) -> None:
    """Brings up loopback, while it has the rights. The host name is a copy of the fork server's."""
    kernel.bring_up_loopback()


def _mount_proc(child: _Child) -> None:
    """Mounts /proc and terminals of the sandbox's own over the fork server's files, which are read-only.

    The first process of the pid namespace does it, because /proc shows its mounter's namespace. The fork server's /proc
    is removed rather than covered: a cover can be taken off. The new one is first mounted elsewhere, because the kernel
    mounts a /proc only if it sees another one in full. This needs the fork server's user 0, so it precedes
    `_become_user`.
    """
    kernel.mount("proc", _EMPTY, "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    child.settings = os.open(f"{_EMPTY}/sys", os.O_PATH | os.O_CLOEXEC)
    kernel.unmount("/proc")
    kernel.mount(_EMPTY, "/proc", flags=MS_MOVE)
    for name in _READ_ONLY_IN_PROC:
        if os.path.exists(f"/proc/{name}"):
            kernel.mount(f"/proc/{name}", f"/proc/{name}", flags=MS_BIND)
            kernel.mount(
                "none", f"/proc/{name}", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
            )
    kernel.mount("devpts", "/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, _DEVPTS_OPTIONS)


def _mount_files(child: _Child) -> None:
    """Mounts the sandbox's own files with their sizes. Precedes `_become_user`: it needs the fork server's user 0."""
    sizes = child.plan["sizes"]
    # The sandbox's user owns them: no other user exists inside, and programs distrust a directory of an unknown one.
    # None: that is the fork server's user 0.
    owner = child.plan["host_uid"] or 0
    for place, size in (("/workspace", sizes["disk"]), ("/dev/shm", sizes["shm"])):
        _mount_memory(place, size, sizes["files"], owner)
    # Replaces the fork server's /tmp, keeping only the image's directories in it: the template process has already read
    # what its modules wrote there.
    kept = [(str(place), kernel.copy_mounts(place)) for place in child.plan["below_tmp"]]
    kernel.unmount("/tmp")
    _mount_memory("/tmp", sizes["disk"], sizes["files"], owner)
    for place, copy in kept:
        os.makedirs(place)
        kernel.mount_copy(copy, place)
        os.close(copy)


def _mount_memory(place: str, size_bytes: int, files: int, owner: int) -> None:
    options = f"mode=1777,uid={owner},gid={owner},size={size_bytes},nr_inodes={files + 1}"  # its own directory is one
    kernel.mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, options)


def _become_user(child: _Child) -> None:
    """Becomes the sandbox's user on the host, then the only user of its own user namespace, irrevocably.

    1. The host's user first, while the fork server's user 0 may choose it: groups, then the group, then the user, real,
       effective and saved, so that there is no way back. Under an ordinary user's daemon there is only one user.
    2. That user creates the namespace and owns it, so from above that user has every right in it; earlier, the fork
       server's user 0 would own it. Its map has one line, so there is no other user to become. To write the map, the
       process must own its files in /proc, but a change of user makes them root's: hence `show_memory`, while no
       process exists that could read them.
    3. All other namespaces still belong to the fork server: even with every right in its own namespace, the sandbox
       can't mount, or configure its network.
    4. The bounding set is dropped first, then all sets: dropping the first takes a right from the second.
    """
    host_uid = child.plan["host_uid"]
    own = os.open("/proc/self", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    if host_uid is None:
        _close_own_files()
    else:
        os.setgroups([])
        os.setresgid(host_uid, host_uid, host_uid)
        os.setresuid(host_uid, host_uid, host_uid)
    uid, gid = os.getuid(), os.getgid()
    privileges.show_memory()
    kernel.unshare(kernel.CLONE_NEWUSER)
    inside = int(child.plan["uid"])
    for name, text in (("setgroups", "deny"), ("uid_map", f"{inside} {uid} 1"), ("gid_map", f"{inside} {gid} 1")):
        fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=own)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)
    os.close(own)
    for name, most in _OWN_MAXIMA:  # those of its own namespace
        fd = os.open(f"user/{name}", os.O_WRONLY | os.O_CLOEXEC, dir_fd=child.settings)
        os.write(fd, most)
        os.close(fd)
    os.close(child.settings)
    privileges.hide_memory()
    privileges.drop_bounding_set()
    privileges.drop_capabilities()


def _close_own_files() -> None:
    """Makes this process's files in /proc read-only, for an ordinary user's daemon.

    They belong to user 0 of the namespace in which the program was executed, the fork server's. Here that is the same
    host user as agent code, which could make the supervisor the kernel's first victim when memory is short. Reading
    secrets in them needs the right to trace, which nothing inside has. This precedes the loss of the rights over
    mounts; the map of users is written through a descriptor opened earlier.
    """
    kernel.mount("/proc/1", "/proc/1", flags=MS_BIND)
    kernel.mount("none", "/proc/1", flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)


def _limit_resources(child: _Child) -> None:
    """Sets the resource limits, hard and soft. Lowering them needs no right.

    This follows `_become_user`: a new user namespace takes its creator's limit of processes as its maximum, and the
    kernel compares that with the user's processes in the namespace above. Under an ordinary user's daemon these are the
    processes of all sandboxes, so one could leave the others none. Set afterwards, the limit is compared with the
    sandbox's own count.
    """
    for kind, value in child.plan["rlimits"]:
        rlimits.limit(kind, value)


def _filter_system_calls(child: _Child) -> None:
    """Loads the system call filter, after all steps whose calls it refuses."""
    import binascii

    privileges.gain_no_privileges()  # already inherited; without it the kernel refuses the filter
    privileges.filter_system_calls(binascii.a2b_base64(child.plan["seccomp"]))


def _settle(child: _Child) -> None:
    """Gives the fork the session's process name, environment variables and working directory."""
    privileges.name_process(os.path.basename(sys.executable))
    wanted = {str(name): str(value) for name, value in child.plan["environment"].items()}
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:  # most are the template process's, and writing them would copy their pages
            os.environ[name] = value
    os.chdir("/workspace")


_STEPS = (
    ("make namespaces", _make_namespaces),
    ("bring up its network", _bring_up),
    ("mount /proc", _mount_proc),
    ("read its plan", _read_plan),
    ("join its control groups", _join_groups),
    ("take its streams", _take_streams),
    ("mount its files", _mount_files),
    ("become its user", _become_user),
    ("limit its resources", _limit_resources),
    ("filter its system calls", _filter_system_calls),
    ("settle", _settle),
)
