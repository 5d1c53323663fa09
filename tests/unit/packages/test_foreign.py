"""The Python of a machine in a cloud, in the words of uv."""

from __future__ import annotations

import pytest

from executor_server.backends.environments import Interpreter
from executor_server.core.errors import EnvironmentFailed
from executor_server.packages.uv import foreign_python


@pytest.mark.parametrize(
    ("interpreter", "platform"),
    [
        (Interpreter((3, 12), "x86_64", "glibc", (2, 36)), "x86_64-manylinux_2_36"),
        (Interpreter((3, 12), "aarch64", "glibc", (2, 30)), "aarch64-manylinux_2_28"),
        (Interpreter((3, 9), "x86_64", "glibc", (2, 99)), "x86_64-manylinux_2_40"),
        (Interpreter((3, 13), "x86_64", "musl", (1, 2)), "x86_64-unknown-linux-musl"),
    ],
)
def test_uv_is_told_of_a_platform_that_the_machine_can_run(interpreter: Interpreter, platform: str) -> None:
    foreign = foreign_python(interpreter)
    assert (foreign.version, foreign.platform) == (".".join(map(str, interpreter.version)), platform)


@pytest.mark.parametrize(
    "interpreter",
    [
        Interpreter((3, 12), "riscv64", "glibc", (2, 36)),
        Interpreter((3, 12), "x86_64", "glibc", (2, 5)),
        Interpreter((3, 12), "x86_64", "", (0, 0)),
    ],
)
def test_a_machine_that_uv_has_no_platform_for_is_refused(interpreter: Interpreter) -> None:
    with pytest.raises(EnvironmentFailed, match="no packages for the machines of this image"):
        foreign_python(interpreter)
