"""The filter's verdicts, for both architectures, by an interpreter of the instructions that it is made of."""

from __future__ import annotations

import errno
import functools
import re
import struct
from pathlib import Path

import pytest

from executor_server.backends import syscalls
from executor_server.backends.seccomp_program import UnsupportedArchitecture, filter_program

ALLOW, KILL = "allow", "kill"
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
I386 = 0x40000003
NUMBERS = {"x86_64": syscalls.X86_64, "aarch64": syscalls.AARCH64}
HEADERS = {"x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")}

# (arguments that aim at the caller or at a thread, arguments that aim at the supervisor)
STEERING = {
    "prlimit64": ((0, 7), (1, 7)),
    "sched_setaffinity": ((77, 8), (1, 8)),
    "sched_setattr": ((0,), (1,)),
    "sched_setparam": ((0,), (1 << 32 | 1,)),
    "sched_setscheduler": ((77,), (1,)),
    "setpriority": ((0, 0, 5), (0, 1, 5)),
    "ioprio_set": ((1, 0), (1, 1)),
}

machines = pytest.mark.parametrize("machine", sorted(NUMBERS))


Instructions = list[tuple[int, ...]]


def instructions_of(program: bytes) -> Instructions:
    return list(struct.iter_unpack("=HBBI", program))


@functools.cache
def _program(machine: str) -> Instructions:
    return instructions_of(filter_program(machine))


def verdict(
    machine: str, number: int, *arguments: int, arch: int | None = None, program: Instructions | None = None
) -> str:
    """Returns the filter's answer to a system call: "allow", "kill" or the name of the error."""
    data = struct.pack("=IIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *(*arguments, *[0] * 6)[:6])
    program = program or _program(machine)
    at, accumulator = 0, 0
    for _ in range(len(program)):
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, operand)[0]
        elif code == 0x54:
            accumulator &= operand
        elif code == 0x05:
            at += operand
        elif code == 0x06:
            names = {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x00050000: "done"}
            return names.get(operand) or errno.errorcode[operand & 0xFFFF]
        else:
            test = {0x15: accumulator == operand, 0x35: accumulator >= operand}
            at += if_true if test[code] else if_false
    raise AssertionError("the program does not end")


@machines
def test_every_call_gets_the_verdict_of_its_list_and_all_others_are_unknown(machine: str) -> None:
    numbers = NUMBERS[machine]
    by_arguments = {
        numbers[name]
        for name in ("clone", "socket", "socketpair", "setsockopt", "prctl", "personality", "ioctl", *STEERING)
    }
    allowed = {numbers[name] for name in syscalls.ALLOWED & numbers.keys()}
    refused = {numbers[name] for name in syscalls.REFUSED & numbers.keys()}
    for number in set(range(600)) - by_arguments:
        expected = ALLOW if number in allowed else "EPERM" if number in refused else "ENOSYS"
        assert verdict(machine, number) == expected, number
    assert verdict(machine, 2**32 - 1) == "ENOSYS"


@machines
def test_the_lists_do_not_overlap_and_name_only_calls_that_exist(machine: str) -> None:
    assert not syscalls.ALLOWED & syscalls.REFUSED
    assert (syscalls.ALLOWED | syscalls.REFUSED) - (syscalls.X86_64.keys() | syscalls.AARCH64.keys()) == set()
    numbers = NUMBERS[machine].values()
    assert len(set(numbers)) == len(numbers)


@machines
def test_another_architecture_is_killed(machine: str) -> None:
    assert verdict(machine, NUMBERS[machine]["read"], arch=I386) == KILL


def test_x32_does_not_exist() -> None:
    assert verdict("x86_64", syscalls.X86_64["read"] | 0x40000000) == "ENOSYS"
    assert verdict("x86_64", syscalls.X86_64["ptrace"] | 0x40000000) == "ENOSYS"


@machines
def test_clone_makes_threads_and_processes_but_no_namespaces(machine: str) -> None:
    clone = NUMBERS[machine]["clone"]
    assert verdict(machine, clone, 17) == ALLOW
    assert verdict(machine, clone, 0x003D0F00) == ALLOW  # the flags of pthread_create
    for bit in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, clone, bit | 17) == "EPERM"
    assert verdict(machine, NUMBERS[machine]["clone3"]) == "ENOSYS"


@machines
def test_sockets_are_local_or_internet_ones(machine: str) -> None:
    number = NUMBERS[machine]["socket"]
    assert {family for family in range(64) if verdict(machine, number, family, 1, 5) == ALLOW} == {1, 2, 10}
    assert verdict(machine, number, 16, 3, 0) == ALLOW
    assert verdict(machine, number, 16, 3, 9) == "EPERM"
    assert verdict(machine, NUMBERS[machine]["socketpair"], 1, 1) == ALLOW
    assert verdict(machine, NUMBERS[machine]["socketpair"], 40, 1) == "EPERM"


@machines
@pytest.mark.parametrize("high_half", [0, 1 << 32])
def test_no_socket_lingers_whatever_the_ignored_bits_are(machine: str, high_half: int) -> None:
    """The supervisor would wait when it closes the socket."""
    setsockopt = NUMBERS[machine]["setsockopt"]
    assert verdict(machine, setsockopt, 3, 1 | high_half, 13 | high_half) == "EPERM"
    assert verdict(machine, setsockopt, 3, 1 | high_half, 7) == ALLOW  # SO_SNDBUF
    assert verdict(machine, setsockopt, 3, 6, 13) == ALLOW  # TCP_CONGESTION


@machines
def test_no_program_brings_a_filter_of_its_own(machine: str) -> None:
    """Their code takes memory of which the whole machine has little."""
    numbers = NUMBERS[machine]
    for name in (26, 27, 50, 51, 52):
        assert verdict(machine, numbers["setsockopt"], 3, 1, name) == "EPERM"
    assert verdict(machine, numbers["prctl"], 22, 2) == verdict(machine, numbers["prctl"], 1 << 32 | 22, 2) == "EPERM"
    assert verdict(machine, numbers["prctl"], 4, 0) == ALLOW  # PR_SET_DUMPABLE
    assert verdict(machine, numbers["seccomp"], 1, 0) == "ENOSYS"


@machines
def test_sizes_of_buffers_are_ignored_where_nothing_counts_them(machine: str) -> None:
    program = instructions_of(filter_program(machine, keeps_buffers=True))
    for name, expected in ((7, 0), (8, 0), (9, ALLOW), (13, "EPERM")):
        number = NUMBERS[machine]["setsockopt"]
        assert verdict(machine, number, 3, 1, name, program=program) == (expected or "done"), name
    assert verdict(machine, number, 3, 6, 7, program=program) == ALLOW  # another level


@machines
@pytest.mark.parametrize("high_half", [0, 1 << 32])
def test_input_into_terminals_is_refused_whatever_the_ignored_bits_are(machine: str, high_half: int) -> None:
    ioctl = NUMBERS[machine]["ioctl"]
    assert verdict(machine, ioctl, 0, 0x5412 | high_half) == "EPERM"
    assert verdict(machine, ioctl, 0, 0x541C | high_half) == "EPERM"
    assert verdict(machine, ioctl, 0, 0x5413 | high_half) == ALLOW


@machines
def test_address_randomisation_stays_on(machine: str) -> None:
    personality = NUMBERS[machine]["personality"]
    assert verdict(machine, personality, 0xFFFFFFFF) == ALLOW
    assert verdict(machine, personality, 0x0) == ALLOW
    assert verdict(machine, personality, 0x0040000) == "EPERM"


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(UnsupportedArchitecture, match="riscv64"):
        filter_program("riscv64")


@pytest.mark.parametrize("machine", sorted(HEADERS))
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    if not HEADERS[machine].exists():
        pytest.skip("no kernel headers here")
    header = dict(re.findall(r"#define __NR_(\w+) (\d+)", HEADERS[machine].read_text()))
    ours = {name: str(number) for name, number in NUMBERS[machine].items()}
    assert {name: number for name, number in ours.items() if header.get(name, number) != number} == {}


@machines
@pytest.mark.parametrize("name", STEERING)
def test_no_call_slows_the_supervisor_down_or_changes_its_limits(machine: str, name: str) -> None:
    own, supervisor = STEERING[name]
    assert verdict(machine, NUMBERS[machine][name], *own) == ALLOW
    assert verdict(machine, NUMBERS[machine][name], *supervisor) == "EPERM"


@machines
def test_no_priority_is_set_for_a_whole_user(machine: str) -> None:
    assert verdict(machine, NUMBERS[machine]["setpriority"], 2, 0, 19) == "EPERM"
    assert verdict(machine, NUMBERS[machine]["ioprio_set"], 3, 0) == "EPERM"
