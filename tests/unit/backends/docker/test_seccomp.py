"""The profile for the Engine means what the local backend's filter means; the two are generated from one table."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from executor_server.backends.docker.seccomp import profile, supports
from executor_server.backends.syscall_arguments import ARGUMENT_RULES
from tests.unit.backends.test_seccomp_program import ALLOW, NUMBERS, STEERING, verdict

machines = pytest.mark.parametrize("machine", sorted(NUMBERS))
INTERESTING = (0, 1, 2, 3, 5, 8, 10, 16, 17, 77, 0x5412, 0x541C, 0x20000, 0x10000000, 4_194_303, 2**32 - 1)


def allows(rules: list[dict[str, Any]], name: str, *arguments: int) -> bool:
    """True when a rule of the profile allows the call; no rule refuses a call that another one allows."""
    return any(
        rule["action"] == "SCMP_ACT_ALLOW"
        and name in rule["names"]
        and all(arguments[test["index"]] & test["value"] == test["valueTwo"] for test in rule.get("args", ()))
        for rule in rules
    )


@machines
def test_calls_are_allowed_refused_or_unknown_as_in_the_local_filter(machine: str) -> None:
    rules = json.loads(profile(machine))["syscalls"]
    by_name = {name: rule for rule in rules for name in rule["names"]}
    for name, number in NUMBERS[machine].items():
        if name in ARGUMENT_RULES:
            continue
        rule = by_name[name]
        action = ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else {1: "EPERM", 38: "ENOSYS"}[rule["errnoRet"]]
        assert action == verdict(machine, number), name


@machines
def test_arguments_are_checked_as_in_the_local_filter(machine: str) -> None:
    rules = json.loads(profile(machine))["syscalls"]
    for name in ARGUMENT_RULES.keys() & NUMBERS[machine].keys():
        rules_of_name = [rule for rule in rules if name in rule["names"]]
        for arguments in itertools.product(INTERESTING, INTERESTING, (0, 9)):
            expected = verdict(machine, NUMBERS[machine][name], *arguments) == ALLOW
            assert allows(rules_of_name, name, *arguments) == expected, (name, arguments)


@machines
@pytest.mark.parametrize("name", STEERING)
def test_the_high_half_of_an_argument_hides_nothing(machine: str, name: str) -> None:
    rules = json.loads(profile(machine))["syscalls"]
    own, supervisor = ((*arguments, 0, 0) for arguments in STEERING[name])
    assert allows(rules, name, *own)
    for high in (0, 1 << 32, 0xFFFFFFFF << 32):
        assert not allows(rules, name, *(argument | high for argument in supervisor))


@machines
def test_no_call_has_rules_of_two_kinds(machine: str) -> None:
    """libseccomp drops a call's rules on arguments when it has one without."""
    rules = json.loads(profile(machine))["syscalls"]
    plain = [name for rule in rules if not rule.get("args") for name in rule["names"]]
    assert len(plain) == len(set(plain))
    assert not set(plain) & {name for rule in rules if rule.get("args") for name in rule["names"]}


def test_a_call_that_is_not_listed_does_not_exist() -> None:
    whole = json.loads(profile("x86_64"))
    assert (whole["defaultAction"], whole["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", 38)
    assert whole["architectures"] == ["SCMP_ARCH_X86_64"]


def test_an_unknown_machine_has_no_profile() -> None:
    assert supports("aarch64") and not supports("riscv64")
