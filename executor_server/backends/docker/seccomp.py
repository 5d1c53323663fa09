"""The filter of system calls as a profile of the Engine: the lists of `backends/syscalls.py`, as JSON.

It means the same as the local backend's filter, with two differences that the format imposes. A call with refused
arguments gets the errno of an unknown call, since a profile can list only calls and not arguments as refused. And an
Engine before 23 knows no `defaultErrnoRet` and answers EPERM for a call that is not listed; runc itself then answers
ENOSYS for calls newer than any in the profile, and clone3, for which libc needs ENOSYS, is listed.

A profile can only require that some bits of an argument have given values. A rule "anything but 1" is therefore
spelled out as several rules, one for each bit in which a number can differ first. All rules allow, so they may overlap
and their order does not matter.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from executor_server.backends.syscall_arguments import ARGUMENT_RULES, Argument
from executor_server.backends.syscalls import AARCH64, ALLOWED, REFUSED, X86_64

_NUMBERS = {"x86_64": X86_64, "aarch64": AARCH64}
_ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}

_Bits = tuple[int, int]  # a mask, and what is under it


def supports(machine: str) -> bool:
    """True when there is a table of system calls for this machine (`uname -m`)."""
    return machine in _NUMBERS


@cache
def profile(machine: str) -> str:
    """The profile for a supported machine. Other architectures that it could run, 32-bit ones, are refused."""
    numbers = _NUMBERS[machine]
    ruled = {name: rule for name, rule in ARGUMENT_RULES.items() if name in numbers}
    unknown = numbers.keys() - ALLOWED - REFUSED - ruled.keys()
    rules = [
        {"names": sorted(ALLOWED & numbers.keys()), "action": "SCMP_ACT_ALLOW"},
        {"names": sorted(REFUSED & numbers.keys()), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        {"names": sorted(unknown), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.ENOSYS},
        *(_allowing(name, tests) for name, rule in ruled.items() for case in rule for tests in _spelled_out(case)),
    ]
    document = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": [_ARCHITECTURES[machine]],
        "syscalls": rules,
    }
    return json.dumps(document, separators=(",", ":"))


def _allowing(name: str, tests: Sequence[tuple[int, _Bits]]) -> dict[str, object]:
    arguments = [
        {"index": index, "op": "SCMP_CMP_MASKED_EQ", "value": mask, "valueTwo": value} for index, (mask, value) in tests
    ]
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": arguments}


def _spelled_out(case: Sequence[Argument]) -> Iterator[tuple[tuple[int, _Bits], ...]]:
    """Every combination that the tests allow: a rule takes one mask and one value for each argument."""
    return product(*([(test.index, bits) for bits in _matching(test)] for test in case))


def _matching(test: Argument) -> list[_Bits]:
    if not test.negated:
        return [(test.mask, value) for value in test.values]
    bits = [1 << at for at in range(test.mask.bit_length() - 1, -1, -1) if test.mask >> at & 1]
    return list(_all_but(frozenset(test.values), bits, (0, 0)))


def _all_but(values: frozenset[int], bits: Sequence[int], under: _Bits) -> Iterator[_Bits]:
    """Yields masks and values that together match every number under `under` except `values`."""
    if not values:
        yield under
    elif bits:
        mask, value = under
        for side in (0, bits[0]):
            inside = frozenset(number for number in values if number & bits[0] == side)
            yield from _all_but(inside, bits[1:], (mask | bits[0], value | side))
