"""The seccomp filter of a sandbox, as the classic BPF program that `bwrap --seccomp` loads.

Theory of operation. The kernel runs the program on each system call with a `struct seccomp_data` (number, architecture,
instruction pointer, six 64-bit arguments) and does what it returns. The program first makes sure that the number means
what we think: another architecture (32-bit code on a 64-bit kernel) kills the process, since there is no honest reason
for it here, and x32, which is x86-64 with a bit set in the number, does not exist. A binary search over ranges of
numbers then finds the verdict. Everything unknown answers ENOSYS; see `syscalls.py` for why.

The filter is one layer of several: it stands even if a namespace, a capability or a mount were wrong, and takes away
the parts of the kernel where most escapes were found.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from executor_server.backends.local import syscalls

# linux/audit.h
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NUMBERS = {"x86_64": syscalls.X86_64, "aarch64": syscalls.AARCH64}
_X32_BIT = 0x40000000

# linux/seccomp.h
_ALLOW = 0x7FFF0000
_KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_EPERM = _ERRNO | errno.EPERM
_ENOSYS = _ERRNO | errno.ENOSYS

# linux/bpf_common.h: the five instructions that are needed.
_LOAD_WORD = 0x20
_JUMP = 0x05
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER_OR_EQUAL = 0x35
_JUMP_IF_ANY_BIT = 0x45
_RETURN = 0x06

# Where struct seccomp_data keeps its fields; both architectures are little-endian, so the low half comes first.
_NUMBER_OFFSET = 0
_ARCH_OFFSET = 4
_ARGUMENTS_OFFSET = 16

# linux/sched.h: NEWTIME is not here because clone() takes those bits for the exit signal.
_CLONE_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_NETLINK_ROUTE = 0
# asm-generic/ioctls.h: both type into a terminal on somebody else's behalf (CVE-2017-5226, CVE-2023-28339).
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
# linux/personality.h: as Docker: plain, 32-bit, with UNAME26, and the query. Among the rest is ADDR_NO_RANDOMIZE.
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)

# The supervisor, as code in the sandbox sees it.
_SUPERVISOR = 1
# linux/resource.h and linux/ioprio.h: everything of one user, which the supervisor belongs to.
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3

_Instruction = tuple[int, int, int, int]
_Program = list[_Instruction]


class UnsupportedArchitecture(Exception):
    """No system call table for this machine."""


@dataclass(frozen=True)
class _Range:
    """System calls from `first` up to the next range share one block of instructions."""

    first: int
    block: tuple[_Instruction, ...]


def filter_program(machine: str | None = None) -> bytes:
    """The filter for this machine (`platform.machine()` names), ready for `bwrap --seccomp`."""
    machine = machine or platform.machine()
    if machine not in _NUMBERS:
        raise UnsupportedArchitecture(f"no system call table for {machine}; known are {', '.join(sorted(_NUMBERS))}")
    program: _Program = [
        _load(_ARCH_OFFSET),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        _return(_KILL_PROCESS),
        _load(_NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [(_JUMP_IF_GREATER_OR_EQUAL, 0, 1, _X32_BIT), _return(_ENOSYS)]
    program += _search(_ranges(_NUMBERS[machine]))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _ranges(numbers: Mapping[str, int]) -> list[_Range]:
    blocks: dict[int, tuple[_Instruction, ...]] = {}
    for names, action in ((syscalls.ALLOWED, _ALLOW), (syscalls.REFUSED, _EPERM)):
        blocks |= {numbers[name]: (_return(action),) for name in names if name in numbers}
    blocks |= {numbers[name]: tuple(rule) for name, rule in _argument_rules().items()}
    unknown = (_return(_ENOSYS),)
    ranges = [_Range(0, blocks.get(0, unknown))]
    for number in range(1, max(blocks) + 2):  # one past the end: the last range is the unknown
        block = blocks.get(number, unknown)
        if block != ranges[-1].block:
            ranges.append(_Range(number, block))
    return ranges


def _search(ranges: list[_Range]) -> _Program:
    """Binary search. Conditional jumps reach only 255 instructions, so the far side is reached by a plain jump."""
    if len(ranges) == 1:
        return list(ranges[0].block)
    middle = len(ranges) // 2
    below, above = _search(ranges[:middle]), _search(ranges[middle:])
    return [(_JUMP_IF_GREATER_OR_EQUAL, 0, 1, ranges[middle].first), (_JUMP, 0, 0, len(below)), *below, *above]


def _argument_rules() -> dict[str, _Program]:
    return {
        # Threads and processes are made with clone; a new namespace would give its maker all capabilities inside.
        "clone": [_argument(0), (_JUMP_IF_ANY_BIT, 0, 1, _CLONE_NEW_NAMESPACES), _return(_EPERM), _return(_ALLOW)],
        # Its flags are behind a pointer, where no filter can see them. ENOSYS makes libc take clone instead.
        "clone3": [_return(_ENOSYS)],
        "socket": [
            _argument(0),
            (_JUMP_IF_EQUAL, 6, 0, _AF_UNIX),
            (_JUMP_IF_EQUAL, 5, 0, _AF_INET),
            (_JUMP_IF_EQUAL, 4, 0, _AF_INET6),
            # libc reads interface addresses by netlink before it resolves a name; no other protocol of it is needed.
            (_JUMP_IF_EQUAL, 0, 2, _AF_NETLINK),
            _argument(2),
            (_JUMP_IF_EQUAL, 1, 0, _NETLINK_ROUTE),
            _return(_EPERM),
            _return(_ALLOW),
        ],
        "socketpair": _only_if_equal(0, (_AF_UNIX,)),
        "personality": _only_if_equal(0, _PERSONALITIES),
        # The kernel looks at the low half of the request only, and so must the filter.
        "ioctl": [
            _argument(1),
            (_JUMP_IF_EQUAL, 1, 0, _TIOCSTI),
            (_JUMP_IF_EQUAL, 0, 1, _TIOCLINUX),
            _return(_EPERM),
            _return(_ALLOW),
        ],
        # The kernel lets a process slow another one of its user down and take its limits away, even one that it may
        # not trace. A supervisor that gets no processor keeps no deadline, and takes a minute to be killed.
        **{name: _unless_equal((0, _SUPERVISOR)) for name in _STEERING},
        "setpriority": _unless_equal((0, _PRIO_USER), (1, _SUPERVISOR)),
        "ioprio_set": _unless_equal((0, _IOPRIO_WHO_USER), (1, _SUPERVISOR)),
    }


# Their first argument is a process, 0 being the caller.
_STEERING = ("prlimit64", "sched_setaffinity", "sched_setattr", "sched_setparam", "sched_setscheduler")


def _unless_equal(*refused: tuple[int, int]) -> _Program:
    """Allows the call unless one of the arguments (index, value) is that."""
    tests = [
        step for index, value in refused for step in (_argument(index), (_JUMP_IF_EQUAL, 0, 1, value), _return(_EPERM))
    ]
    return [*tests, _return(_ALLOW)]


def _only_if_equal(index: int, values: tuple[int, ...]) -> _Program:
    tests = [(_JUMP_IF_EQUAL, len(values) - position, 0, value) for position, value in enumerate(values)]
    return [_argument(index), *tests, _return(_EPERM), _return(_ALLOW)]


def _load(offset: int) -> _Instruction:
    return (_LOAD_WORD, 0, 0, offset)


def _argument(index: int) -> _Instruction:
    """Loads the low half of an argument; what is tested here are all `int` or `unsigned int` in the kernel."""
    return _load(_ARGUMENTS_OFFSET + 8 * index)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)
