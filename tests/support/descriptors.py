"""Descriptors of this process: those that a piece of code opens and forgets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def open_descriptors() -> dict[int, str]:
    """Each open descriptor, and what it is of."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names only
        try:
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
        except OSError:
            continue  # the one that the directory was read with
    return found


@contextmanager
def none_left_open() -> Iterator[None]:
    """Fails when what ran inside left a descriptor open."""
    before = open_descriptors()
    yield
    # gRPC's threads, which earlier tests have started in this process, open event descriptors when they like.
    now = {fd: what for fd, what in open_descriptors().items() if "[eventfd]" not in what}
    left = {fd: what for fd, what in now.items() if fd not in before}
    assert not left, f"left open: {left}"
