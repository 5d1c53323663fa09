"""A parent for the test process that makes "nothing is left over" a question with an exact answer.

A daemon that is killed leaves orphans behind, and orphans go to init, where their origin is lost. So the
test process forks once, before it has threads: the child goes on and runs the tests; the parent, the *reaper*, is a
child subreaper. Every orphan of any depth becomes its child and is reaped at once, as an init would do it. What is a
child of the reaper, and not the test process, is an orphan of ours, whatever its name is; and when the tests are over,
or are killed, the reaper ends what is left and removes the run's directory.

A worker of pytest-xdist has threads when it imports the tests. It is started by this module's `main`, which forks first.
pytest-xdist kills a worker's reaper if the worker takes long to end. So the run's own reaper, to which the orphans go
then, removes the directories of all workers, too.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

_prctl = ctypes.CDLL(None, use_errno=True).prctl


RUN_DIRECTORY_PREFIX = "rx-"
# Set for a worker: its run directory, and that of the whole run.
RUN_DIRECTORY_VARIABLE = "EXECUTOR_TEST_RUN_DIRECTORY"
RUN_VARIABLE = "EXECUTOR_TEST_RUN"
WORKER = f"popen//python={sys.executable} -m {__name__}"
"""The specification of a worker for pytest-xdist."""


def run_directory() -> Path:
    """Returns the directory of this run. Forks the reaper, unless this is a worker, which has one."""
    if (made := os.environ.pop(RUN_DIRECTORY_VARIABLE, None)) is not None:
        return Path(made)
    directory = fork_reaper()
    os.environ[RUN_VARIABLE] = str(directory)
    return directory


def fork_reaper(run: Path | None = None) -> Path:
    """Returns, in a child of the reaper, the directory of this run. The calling process itself becomes the reaper.

    A worker's directory has the name of the whole run's, `run`, and a number: paths of sockets have to be short.
    """
    run_directory = Path(tempfile.mkdtemp(prefix=RUN_DIRECTORY_PREFIX)) if run is None else _make_numbered(run)
    _set(PR_SET_CHILD_SUBREAPER, 1)
    reaper = os.getpid()
    tests = os.fork()
    if tests != 0:
        _keep(tests, run_directory)
    die_with_parent(reaper)
    return run_directory


def _make_numbered(run: Path) -> Path:
    for number in itertools.count():
        directory = run.with_name(f"{run.name}-{number}")
        try:
            directory.mkdir(0o700)
        except FileExistsError:
            continue
        return directory
    raise AssertionError


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
    for directory in (run_directory, *run_directory.parent.glob(f"{run_directory.name}-*")):
        shutil.rmtree(directory, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _set(option: int, value: int) -> None:
    if _prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main() -> None:
    """Becomes the interpreter that the arguments start, as a child of a reaper."""
    os.environ[RUN_DIRECTORY_VARIABLE] = str(fork_reaper(Path(os.environ[RUN_VARIABLE])))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
