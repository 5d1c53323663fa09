"""System calls whose arguments decide whether code in a sandbox may make them.

The rules are data, so that each backend can write them in its filter's form, with the same meaning. A test
reads the low half of an argument only. The arguments tested here are all `int` or `unsigned int` in the kernel, which
ignores the high half: a filter that read it could be deceived by bits that have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """Holds when the argument, under the mask, is one of the values; `negated`, when it is none of them."""

    index: int
    values: tuple[int, ...]
    mask: int = 0xFFFFFFFF
    negated: bool = False


Alternatives = tuple[tuple[Argument, ...], ...]
"""The call is allowed when every test of one alternative holds; else it answers EPERM."""


# linux/sched.h: NEWTIME is not here because clone() takes those bits for the exit signal.
_CLONE_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0
# asm-generic/socket.h, the same on both architectures. The attack: a program sets a linger time on a socket and sends
# its descriptor to the supervisor. The process that closes a lingering socket last blocks until its unsent data is
# sent, up to the time of the option, whatever the socket's blocking mode is. The supervisor closes each descriptor
# that it receives, also where the kernel discards it on receipt. So one message would delay every deadline, and the
# supervisor could not prevent it.
_SOL_SOCKET, _SO_LINGER = 1, 13
# Filters of sockets and of system calls take memory for code, which is scarce on the whole machine
# (net.core.bpf_jit_limit): without it no sandbox gets a filter, so none can be made. SO_ATTACH_FILTER,
# SO_DETACH_FILTER, SO_ATTACH_BPF, SO_ATTACH_REUSEPORT_CBPF and _EBPF; PR_SET_SECCOMP. Chromium runs with --no-sandbox:
# its own sandbox needs namespaces, too.
_SOCKET_FILTERS = (26, 27, 50, 51, 52)
_PR_SET_SECCOMP = 22
# asm-generic/ioctls.h: both inject input into the terminal of another process (CVE-2017-5226, CVE-2023-28339).
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# linux/personality.h, as Docker allows: plain, 32-bit, with UNAME26, and the query. ADDR_NO_RANDOMIZE is refused.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# The supervisor's process id inside the sandbox. No id has more bits than _PROCESS_BITS (PID_MAX_LIMIT); a filter that
# has to spell "anything else" out bit by bit needs one alternative for each.
_SUPERVISOR = (1,)
_PROCESS_BITS = 0x3FFFFF
# linux/resource.h and linux/ioprio.h. PRIO_USER is missing: it would reach the supervisor, which has the same user.
_PRIO_PROCESS, _PRIO_GROUP = 0, 1
_IOPRIO_PROCESS, _IOPRIO_GROUP = 1, 2


def _not_the_supervisor(index: int) -> Argument:
    return Argument(index, _SUPERVISOR, _PROCESS_BITS, negated=True)


def _one_of(index: int, *values: int) -> Argument:
    return Argument(index, values)


BUFFER_SIZES: Alternatives = ((_one_of(1, _SOL_SOCKET), _one_of(2, 7, 8)),)
"""Calls of setsockopt (SO_SNDBUF, SO_RCVBUF). They do nothing where no control group counts the memory of sockets:
there the supervisor counts each socket with the default size."""

ARGUMENT_RULES: Mapping[str, Alternatives] = {
    # Threads and processes are made with clone; a new namespace would give its creator all capabilities inside. clone3
    # is in no list: its flags are behind a pointer, where no filter sees them. ENOSYS makes libc take clone instead.
    "clone": ((Argument(0, (0,), _CLONE_NEW_NAMESPACES),),),
    "socket": (
        (_one_of(0, _AF_UNIX, _AF_INET, _AF_INET6),),
        # libc reads interface addresses by netlink before it resolves a name; it needs no other netlink protocol.
        (_one_of(0, _AF_NETLINK), _one_of(2, _NETLINK_ROUTE)),
    ),
    "socketpair": ((_one_of(0, _AF_UNIX),),),
    "setsockopt": (
        (Argument(1, (_SOL_SOCKET,), negated=True),),
        (Argument(2, (_SO_LINGER, *_SOCKET_FILTERS), negated=True),),
    ),
    "prctl": ((Argument(0, (_PR_SET_SECCOMP,), negated=True),),),
    "personality": ((_one_of(0, *_PERSONALITIES),),),
    "ioctl": ((Argument(1, (_TIOCSTI, _TIOCLINUX), negated=True),),),
    # The kernel allows a process to slow down another one of the same user and to lower its limits, even one that it
    # may not trace. A supervisor that gets no processor time keeps no deadline, and takes a minute to be killed. The
    # first argument of these calls is a process; 0 is the caller.
    **dict.fromkeys(
        ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler"),
        ((_not_the_supervisor(0),),),
    ),
    "setpriority": ((_one_of(0, _PRIO_PROCESS, _PRIO_GROUP), _not_the_supervisor(1)),),
    "ioprio_set": ((_one_of(0, _IOPRIO_PROCESS, _IOPRIO_GROUP), _not_the_supervisor(1)),),
}
