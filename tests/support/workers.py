"""Runs the collected tests in several processes: `pytest --workers=N`.

The process that pytest started collects the tests, forks the workers and hands out the work; a worker runs groups of
tests one after the other and sends each report back, so that pytest's own plugins (failures, durations, --last-failed,
exit status) see the reports of one run. Most tests wait for sandboxes, containers and daemons most of the time, so more
workers than processors pay.

A worker is a fork with a reaper and a run directory of its own (tests/support/reaper.py). Its processes, temporary
files, mounts and containers are those of no other worker, and "nothing is left over after this test" keeps its meaning.

A group is what one worker runs without interruption: all tests of a file that share a fixture of a wider scope than one
test, once for each of that fixture's parameters; or a few tests of a file that share nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.scope import Scope

from tests.support.reaper import die_with_parent, fork_reaper

# Tests of a file that share nothing are handed out in groups of at most this many: enough to make the cost of handing
# out small, few enough that one slow file does not keep one worker busy after the others have finished.
GROUP_TESTS = 12
# The slowest tests per item begin first, so that small ones fill the end of the run.
SLOWEST_FIRST = ("chaos", "security", "features", "integration", "contract", "rpc", "unit")
# Seconds for a worker to end its fixtures after it was asked to stop.
STOP_TIMEOUT_S = 60.0
# Fixtures of a wide scope that every test may have and that hold nothing of the host.
_HOLD_NOTHING = {"tmp_path_factory", "tmpdir_factory", "pytestconfig", "record_testsuite_property", "event_loop_policy"}
# They write into the cache directory or a report at the end of a run, which is the coordinator's part.
_COORDINATOR_PLUGINS = ("lfplugin", "nfplugin", "stepwiseplugin")


def group_items(items: list[pytest.Item]) -> list[list[int]]:
    """Returns the groups in the order in which they are handed out, each a list of positions in `items`."""
    groups: dict[Any, list[int]] = {}
    counts: dict[Path, int] = {}
    for index, item in enumerate(items):
        shared = _shared_fixtures(item)
        if shared is None:
            counts[item.path] = counts.get(item.path, 0) + 1
            key: Any = (item.path, (counts[item.path] - 1) // GROUP_TESTS)
        else:
            key = (item.path, shared)
        groups.setdefault(key, []).append(index)
    return sorted(groups.values(), key=lambda group: _rank(items[group[0]].path))


def _shared_fixtures(item: pytest.Item) -> tuple[str, ...] | None:
    """The parameters of the fixtures that the test shares with others; None when it shares no fixture."""
    definitions = getattr(item, "_fixtureinfo", None)
    if definitions is None:
        return ()
    wide = {
        name
        for name, found in definitions.name2fixturedefs.items()
        if found and found[-1]._scope > Scope.Function and name not in _HOLD_NOTHING and not name.endswith("_runner")
    }
    if not wide:
        return None
    callspec = getattr(item, "callspec", None)
    return tuple(sorted(f"{name}={callspec.params[name]}" for name in wide if callspec and name in callspec.params))


def _rank(path: Path) -> int:
    return next((rank for rank, name in enumerate(SLOWEST_FIRST) if name in path.parts), len(SLOWEST_FIRST))


# ---------------------------------------------------------------------------------------------------------------------
# The coordinator


class Coordinator:
    """Hands out the groups of a session and passes the workers' reports to pytest.

    The workers' run directories are made in `base`. `begin` prepares a worker's process for its run directory and returns
    what is to be called at its end, with the leftovers as its result.
    """

    def __init__(self, workers: int, base: Path, begin: Callable[[Path], Callable[[], list[str]]]) -> None:
        self._workers = workers
        self._base = base
        self._begin = begin
        self._selector = selectors.DefaultSelector()
        self._living: set[_WorkerHandle] = set()
        self._number = 0
        self.leftovers: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly or len(session.items) <= 1:
            return None
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # the tests of several files take turns
        waiting = group_items(session.items)
        sys.stdout.flush()  # each worker would write what is buffered now
        # The tests' own objects are looked at by no collection from here on, which would also copy their pages.
        gc.collect()
        gc.freeze()
        try:
            for _ in range(min(self._workers, len(waiting))):
                self._start_worker(session)
            while self._living:
                for key, _ in self._selector.select():
                    self._serve(key.data, session, waiting)
        finally:
            self._stop()
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _serve(self, worker: _WorkerHandle, session: pytest.Session, waiting: list[list[int]]) -> None:
        """Takes what a worker has sent."""
        messages = worker.receive()
        if messages is None:
            self._bury(worker, session, waiting)
            return
        for message in messages:
            match message["kind"]:
                case "group":
                    stopping = bool(session.shouldfail or session.shouldstop)
                    group = waiting.pop(0) if waiting and not stopping else []
                    worker.left.extend(group)
                    worker.send(group)
                case "start":
                    worker.running = message["index"]
                    item = session.items[worker.running]
                    session.config.hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
                case "report":
                    report = session.config.hook.pytest_report_from_serializable(
                        config=session.config, data=message["report"]
                    )
                    # JSON has no tuples; pytest wants what it shows of a skipped test to be one.
                    if isinstance(report.longrepr, list):
                        report.longrepr = tuple(report.longrepr)
                    session.config.hook.pytest_runtest_logreport(report=report)
                case "finish":
                    item = session.items[message["index"]]
                    worker.left.remove(message["index"])
                    worker.running = None
                    session.config.hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
                case "end":
                    worker.ended = True
                    self.leftovers += message["leftovers"]
        if session.shouldfail or session.shouldstop:
            for each in self._living:
                each.interrupt()

    def _bury(self, worker: _WorkerHandle, session: pytest.Session, waiting: list[list[int]]) -> None:
        """Ends the books of a worker that has exited; what it did not run goes to another."""
        self._selector.unregister(worker.connection)
        self._living.discard(worker)
        worker.connection.close()
        status = worker.wait()
        if worker.ended:
            return
        if worker.running is not None:
            item = session.items[worker.running]
            worker.left.remove(worker.running)
            text = f"worker {worker.number} ended with status {status} while it ran this test"
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
            session.config.hook.pytest_runtest_logreport(report=report)
        else:
            self.leftovers.append(f"worker {worker.number} ended with status {status} between two tests")
        if session.shouldfail or session.shouldstop:
            return
        if worker.left:
            waiting.insert(0, worker.left)
        if waiting:
            self._start_worker(session)

    def _start_worker(self, session: pytest.Session) -> None:
        ours, theirs = socket.socketpair()
        coordinator = os.getpid()
        self._number += 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of numpy's, which survive a fork
            pid = os.fork()
        if pid == 0:
            status = 1
            try:
                # Kept open, another worker's socket would hide that its worker has ended.
                for other in self._living:
                    other.connection.close()
                self._selector.close()
                ours.close()
                die_with_parent(coordinator)
                run_directory = fork_reaper(self._base)
                _run_worker(session, theirs, self._number, self._begin(run_directory))
                status = 0
            except BaseException:  # noqa: BLE001 - pytest's frames below must not see it
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)
        theirs.close()
        handle = _WorkerHandle(self._number, pid, ours)
        self._living.add(handle)
        self._selector.register(ours, selectors.EVENT_READ, handle)

    def _stop(self) -> None:
        """Ends the workers that are left, as after an interrupt."""
        for worker in self._living:
            worker.interrupt()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._living:
            worker.wait(deadline)
            worker.connection.close()
        self._living.clear()
        self._selector.close()


class _WorkerHandle:
    """The coordinator's end of one worker."""

    def __init__(self, number: int, pid: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.left: list[int] = []  # handed out and not finished, as positions in the session's items
        self.running: int | None = None
        self.ended = False
        self._pid = pid
        self._buffer = b""
        self._interrupted = False

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns the messages that have arrived; None when the worker has exited."""
        try:
            data = self.connection.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            return None
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def send(self, group: list[int]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its end is seen by `receive`
            self.connection.sendall(json.dumps(group).encode() + b"\n")

    def interrupt(self) -> None:
        """Asks it to run no further test."""
        if not self._interrupted:
            self._interrupted = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_WR)

    def wait(self, deadline: float | None = None) -> int:
        """Its exit status; past the deadline it is killed, and its reaper ends what it started."""
        while deadline is not None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                os.kill(self._pid, signal.SIGTERM)
                deadline = None
            else:
                time.sleep(0.05)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


# ---------------------------------------------------------------------------------------------------------------------
# A worker


class _Reporting:
    """The plugin of a worker that sends each report to the coordinator."""

    def __init__(self, config: pytest.Config, send: Callable[..., None]) -> None:
        self._config = config
        self._send = send

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._send("report", report=data)


def _run_worker(session: pytest.Session, connection: socket.socket, number: int, end: Callable[[], list[str]]) -> None:
    """Runs groups until there is none left, then sends what was left over."""
    config = session.config
    os.environ["EXECUTOR_TEST_WORKER"] = str(number)
    reader = connection.makefile("rb")

    def send(kind: str, **fields: Any) -> None:
        connection.sendall(json.dumps({"kind": kind, **fields}, default=str).encode() + b"\n")

    _take_over(config)
    config.pluginmanager.register(_Reporting(config, send), "worker-reporting")
    indices = _handed_out(reader, send)
    index = next(indices, None)
    while index is not None:
        following = None if _is_interrupted(connection) else next(indices, None)
        send("start", index=index)
        item, next_item = session.items[index], None if following is None else session.items[following]
        config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        send("finish", index=index)
        index = following
    leftovers = end()
    status = pytest.ExitCode.TESTS_FAILED if session.testsfailed else pytest.ExitCode.OK
    config.pluginmanager.getplugin("tmpdir").pytest_sessionfinish(session, status)
    atexit._run_exitfuncs()
    send("end", leftovers=leftovers)


_inherited: list[Any] = []  # the coordinator's capture, which must not be collected


def _take_over(config: pytest.Config) -> None:
    """Replaces what a fork shares with the coordinator: the captured output's files, the terminal, the cache."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None and capture.is_globally_capturing():
        # Suspended and not stopped, which would close its files: a library may have taken sys.stderr as a default.
        _inherited.append(capture._global_capturing)
        capture._global_capturing.suspend_capturing(in_=True)
        capture._global_capturing = None
        capture.start_global_capturing()
        capture.suspend_global_capture()
    reporter = config.pluginmanager.getplugin("terminalreporter")
    if reporter is not None:
        reporter._tw._file = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    for name in _COORDINATOR_PLUGINS:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)


def _handed_out(reader: Any, send: Callable[..., None]) -> Iterator[int]:
    """The tests to run, as positions in the session's items; asks for a group when there is none left."""
    while True:
        send("group")
        line = reader.readline()
        group = json.loads(line) if line else []
        if not group:
            return
        yield from group


def _is_interrupted(connection: socket.socket) -> bool:
    """The coordinator sends nothing that was not asked for; so what can be read is the end of the connection."""
    with selectors.DefaultSelector() as selector:
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(0))
