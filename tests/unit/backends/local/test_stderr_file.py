"""The standard error of a sandbox is kept in a bounded file."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from executor_server.backends.local.stderr_file import STDERR_BYTES, open_stderr, read_stderr


@pytest.fixture
def stderr() -> Iterator[int]:
    fd = open_stderr()
    yield fd
    os.close(fd)


def _write(stderr: int, code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], stderr=stderr, check=False).returncode


def test_the_output_of_several_processes_is_read_in_order(stderr: int) -> None:
    assert read_stderr(stderr) == ""
    for word in ("first", "second"):
        _write(stderr, f"import os; os.write(2, b'{word} \\xff\\n')")
    assert read_stderr(stderr) == "first \\xff\nsecond \\xff"


def test_a_process_that_writes_too_much_neither_waits_nor_ends(stderr: int) -> None:
    flood = "import sys\nfor n in range(10**5):\n    print('x' * 99, file=sys.stderr)"
    assert _write(stderr, f"import contextlib\nwith contextlib.suppress(PermissionError):\n  exec({flood!r})") == 0
    assert read_stderr(stderr).replace("\n", "") == "x" * (STDERR_BYTES - STDERR_BYTES // 100)


def test_a_process_can_neither_grow_nor_shrink_it(stderr: int) -> None:
    for size in (0, STDERR_BYTES + 1):
        with pytest.raises(PermissionError):
            os.truncate(stderr, size)
