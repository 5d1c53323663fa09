"""The guest reads /proc, in which programs choose some of the text."""

from __future__ import annotations

import ctypes
from pathlib import Path

from executor_server.guest.wire.proc import kilobytes, own_bytes

PR_SET_NAME = 15


def test_the_name_of_a_program_is_no_field_of_its_status() -> None:
    """A program could hide its memory by calling itself `RssAnon: 1`."""
    status = b"Name:\tRssAnon: 1\nUmask:\t0022\nRssAnon:\t    5120 kB\n"
    assert kilobytes(status, b"RssAnon:") == 5120
    assert kilobytes(status, b"VmData:") == 0


def test_ones_own_status_is_read_whatever_ones_name() -> None:
    before = Path("/proc/self/comm").read_bytes().strip()
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, b"RssAnon: 1")
    try:
        assert own_bytes(b"RssAnon:") > 2**20
    finally:
        libc.prctl(PR_SET_NAME, before)
