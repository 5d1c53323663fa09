"""A parent for the test process that makes "nothing is left over" a question with an exact answer.

A daemon that is killed leaves orphans behind, and orphans go to init, where their origin is lost. So the
test process forks once, before it has threads: the child goes on and runs the tests; the parent, the *reaper*, is a
child subreaper. Every orphan of any depth becomes its child and is reaped at once, as an init would do it. What is a
child of the reaper, and not the test process, is an orphan of ours, whatever its name is; and when the tests are over,
or are killed, the reaper ends what is left and removes the run's directory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl


RUN_DIRECTORY_PREFIX = "rx-"


def fork_reaper(base: Path | None = None) -> Path:
    """Returns, in a child of the reaper, the directory of this run. The calling process itself becomes the reaper.

    The directory is made in `base`, else where temporary files are made.
    """
    run_directory = Path(tempfile.mkdtemp(prefix=RUN_DIRECTORY_PREFIX, dir=base))
    _set(PR_SET_CHILD_SUBREAPER, 1)
    reaper = os.getpid()
    tests = os.fork()
    if tests != 0:
        _keep(tests, run_directory)
    die_with_parent(reaper)
    return run_directory


def die_with_parent(parent: int) -> None:
    """The calling process, a child of `parent`, is killed when that one ends."""
    _set(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def children(pid: int) -> set[int]:
    """The processes whose parent is `pid`, zombies included."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found.update(map(int, (task / "children").read_text().split()))
        except (FileNotFoundError, ProcessLookupError):  # the thread ended
            continue
    return found


def _keep(tests: int, run_directory: Path) -> None:
    """Reaps until the tests are over, then clears up and exits with their status. Never returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the tests too, and they end in their own way
    signal.signal(signal.SIGTERM, lambda *_: os.kill(tests, signal.SIGTERM))
    while True:
        pid, status = os.wait()
        if pid == tests:
            break
    while left := children(os.getpid()):
        for pid in left:
            os.kill(pid, signal.SIGKILL)  # ours and not waited for yet, so the number can't be another's
            os.waitpid(pid, 0)
    shutil.rmtree(run_directory, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _set(option: int, value: int) -> None:
    if _prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
