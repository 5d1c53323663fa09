"""The proxy's filter: a sandbox's, without what a proxy never does."""

from __future__ import annotations

import os

import pytest

from executor_server.backends import syscalls
from executor_server.network.egress.system_calls import REFUSED, proxy_filter
from tests.unit.backends.test_seccomp_program import ALLOW, NUMBERS, instructions_of, machines, verdict

CLONE_VM, CLONE_THREAD, CLONE_NEWUSER = 0x100, 0x10000, 0x10000000
SIGCHLD = 17


@machines
def test_calls_of_a_sandbox_are_allowed_but_those_that_change_something(machine: str) -> None:
    program, numbers = instructions_of(proxy_filter(machine)), NUMBERS[machine]
    for name in sorted(syscalls.ALLOWED & numbers.keys() - {"open", "openat"}):
        expected = "EPERM" if name in REFUSED else ALLOW
        assert verdict(machine, numbers[name], program=program) == expected, name
    for name in sorted(syscalls.REFUSED & numbers.keys()):
        assert verdict(machine, numbers[name], program=program) == "EPERM", name


def test_each_name_is_one_of_a_sandboxs_calls() -> None:
    assert REFUSED <= syscalls.ALLOWED


@machines
@pytest.mark.parametrize("name", ["open", "openat"])
def test_files_are_opened_for_reading_only(machine: str, name: str) -> None:
    program, numbers = instructions_of(proxy_filter(machine)), NUMBERS[machine]
    if name not in numbers:
        return

    def answer(flags: int) -> str:
        arguments = (0, flags) if name == "open" else (0, 0, flags)
        return verdict(machine, numbers[name], *arguments, program=program)

    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_CLOEXEC, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY):
        assert answer(flags) == ALLOW
    for flags in (os.O_WRONLY, os.O_RDWR, os.O_CREAT, os.O_TRUNC, os.O_RDWR | os.O_TMPFILE, 3, os.O_WRONLY | 1 << 40):
        assert answer(flags) == "EPERM"


@machines
def test_threads_are_made_and_no_processes(machine: str) -> None:
    program, clone = instructions_of(proxy_filter(machine)), NUMBERS[machine]["clone"]
    assert verdict(machine, clone, CLONE_VM | CLONE_THREAD, program=program) == ALLOW
    for flags in (SIGCHLD, CLONE_VM | SIGCHLD, CLONE_THREAD | CLONE_NEWUSER, CLONE_NEWUSER):
        assert verdict(machine, clone, flags, program=program) == "EPERM"


@machines
def test_rules_of_a_sandbox_hold_too(machine: str) -> None:
    program, numbers = instructions_of(proxy_filter(machine)), NUMBERS[machine]
    assert verdict(machine, numbers["socket"], 17, program=program) == "EPERM"  # AF_PACKET
    assert verdict(machine, numbers["setsockopt"], 5, 1, 13, program=program) == "EPERM"  # SO_LINGER
    assert verdict(machine, 600, program=program) == "ENOSYS"
