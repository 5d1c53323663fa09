"""The seccomp filter of a sandbox, as the classic BPF program that the kernel loads, for bwrap or for the guest itself.

Theory of operation. The kernel runs the program on each system call with a `struct seccomp_data` (number, architecture,
instruction pointer, six 64-bit arguments) and obeys its return value. The program first makes sure that the number has
the expected meaning: another architecture (32-bit code on a 64-bit kernel) kills the process, since there is no honest
reason for it here, and x32, which is x86-64 with a bit set in the number, does not exist. A binary search over ranges
of numbers then finds the verdict. Everything unknown answers ENOSYS; `backends/syscalls.py` gives the reason.

The filter is one layer of several: it holds even if a namespace, a capability or a mount were wrong, and removes the
parts of the kernel where most escapes were found.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from executor_server.backends import syscalls
from executor_server.backends.syscall_arguments import ARGUMENT_RULES, BUFFER_SIZES, Alternatives, Argument

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

# linux/bpf_common.h
_LOAD_WORD = 0x20
_AND = 0x54
_JUMP = 0x05
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_GREATER_OR_EQUAL = 0x35
_RETURN = 0x06

# Offsets in struct seccomp_data; both architectures are little-endian, so the low half of an argument comes first.
_NUMBER_OFFSET = 0
_ARCH_OFFSET = 4
_ARGUMENTS_OFFSET = 16

_ALL_BITS = 0xFFFFFFFF

_Instruction = tuple[int, int, int, int]
_Program = list[_Instruction]


class UnsupportedArchitecture(Exception):
    """No system call table for this machine."""


@dataclass(frozen=True)
class _Range:
    """System calls from `first` up to the next range share one block of instructions."""

    first: int
    block: tuple[_Instruction, ...]


def filter_program(
    machine: str | None = None,
    *,
    refused: Collection[str] = (),
    rules: Mapping[str, Alternatives] | None = None,
    keeps_buffers: bool = False,
) -> bytes:
    """The filter for this machine (`platform.machine()` names), ready to be loaded.

    For a process that needs fewer calls than a sandbox, `refused` adds refused calls, and `rules` adds stricter rules.
    `keeps_buffers`: the buffers of sockets stay as large as the kernel makes them, whatever a program requests.
    """
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
    ignored = {"setsockopt": BUFFER_SIZES} if keeps_buffers else {}
    program += _search(_ranges(_NUMBERS[machine], refused, {**ARGUMENT_RULES, **(rules or {})}, ignored))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _ranges(
    numbers: Mapping[str, int],
    refused: Collection[str],
    rules: Mapping[str, Alternatives],
    ignored: Mapping[str, Alternatives],
) -> list[_Range]:
    blocks: dict[int, tuple[_Instruction, ...]] = {}
    for names, action in ((syscalls.ALLOWED, _ALLOW), (syscalls.REFUSED.union(refused), _EPERM)):
        blocks |= {numbers[name]: (_return(action),) for name in names if name in numbers}
    blocks |= {
        numbers[name]: (*_matching(ignored.get(name, ()), _ERRNO), *_matching(rule, _ALLOW), _return(_EPERM))
        for name, rule in rules.items()
        if name in numbers
    }
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


def _matching(alternatives: Alternatives, action: int) -> _Program:
    """Tries them in order; the first whose tests all hold decides. An error of 0 is success: nothing is done."""
    program: _Program = []
    for tests in alternatives:
        rest = [_return(action)]
        for test in reversed(tests):
            rest = [*_test(test, past=len(rest)), *rest]
        program += rest
    return program


def _test(test: Argument, past: int) -> _Program:
    """Continues behind itself when the test holds, and otherwise skips the next `past` instructions."""
    masked = [] if test.mask == _ALL_BITS else [(_AND, 0, 0, test.mask)]
    last = len(test.values)
    # A match jumps over the instruction after the comparisons: over the failure, or negated, over the jump around it.
    comparisons = [(_JUMP_IF_EQUAL, last - at, 0, value) for at, value in enumerate(test.values)]
    around = [(_JUMP, 0, 0, 1)] if test.negated else []
    return [_load(_ARGUMENTS_OFFSET + 8 * test.index), *masked, *comparisons, *around, (_JUMP, 0, 0, past)]


def _load(offset: int) -> _Instruction:
    return (_LOAD_WORD, 0, 0, offset)


def _return(action: int) -> _Instruction:
    return (_RETURN, 0, 0, action)
