"""Measures the peak memory of processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil


def growth_of(*pids: int) -> Callable[[], list[int]]:
    """Begins to measure; what is returned says how many bytes more than then each process has held at most."""
    before = [psutil.Process(pid).memory_info().rss for pid in pids]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts again at the present size
    return lambda: [_peak_bytes(pid) - at_first for pid, at_first in zip(pids, before, strict=True)]


def _peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
