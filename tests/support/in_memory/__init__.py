"""The in-memory fake: a backend that keeps the contract as far as one process can, without a process, a socket or root.

Theory of operation. A sandbox is a guest object of this event loop and a directory for its files. The guest speaks the
real frames, over a transport that is two objects calling each other, and keeps what was not acknowledged, so a daemon
may lose its connection or its life and find the guest again. Agent code runs in a thread, checked and instrumented by
the real guest's own modules, with the real meter in its loops; so it can be counted, interrupted and ended as long as
it is Python that runs.

What it can't: confine. A program that could end, block or change the tests' process must not begin, so only modules
that compute can be imported; `os`, `time` and `sys` are stand-ins with what can be had here. There is no limit of
memory, processes or disk, no signal and no crash. `tests/contract/promises.py` lists what it keeps.
"""

from tests.support.in_memory.backend import MemoryBackend, MemorySandbox
from tests.support.in_memory.host import MemoryHost

__all__ = ["MemoryBackend", "MemoryHost", "MemorySandbox"]
