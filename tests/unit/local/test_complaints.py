"""What a sandbox says when it fails: kept in a bound, whoever listens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from executor_server.backends.local.complaints import COMPLAINT_BYTES, open_complaints, read_complaints


@pytest.fixture
def complaints() -> Iterator[int]:
    fd = open_complaints()
    yield fd
    os.close(fd)


def _say(complaints: int, code: str) -> int:
    return subprocess.run([sys.executable, "-c", code], stderr=complaints, check=False).returncode


def test_what_several_processes_write_is_read_in_order(complaints: int) -> None:
    assert read_complaints(complaints) == ""
    for word in ("first", "second"):
        _say(complaints, f"import os; os.write(2, b'{word} \\xff\\n')")
    assert read_complaints(complaints) == "first \\xff\nsecond \\xff"


def test_who_writes_too_much_is_neither_held_up_nor_ended(complaints: int) -> None:
    flood = "import sys\nfor n in range(10**5):\n    print('x' * 99, file=sys.stderr)"
    assert _say(complaints, f"import contextlib\nwith contextlib.suppress(PermissionError):\n  exec({flood!r})") == 0
    assert read_complaints(complaints).replace("\n", "") == "x" * (COMPLAINT_BYTES - COMPLAINT_BYTES // 100)


def test_nothing_written_there_can_grow_or_shrink_it(complaints: int) -> None:
    for size in (0, COMPLAINT_BYTES + 1):
        with pytest.raises(PermissionError):
            os.truncate(complaints, size)
