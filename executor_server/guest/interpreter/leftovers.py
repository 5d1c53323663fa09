"""Ends the queued calls and the threads of a stopped program. They would spend the operations of later programs."""

from __future__ import annotations

import sys
from _thread import get_ident
from time import sleep

from ..checks.control import ExecutionInterrupted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType, FrameType
    from typing import Any, Optional

_PROGRAMS = "<execution-"
# Frames of a thread that are searched for one of a program.
_MAX_FRAMES = 1000
# How often the threads of pools are checked, and seconds between two checks.
_LOOKS, _LOOK_S = 50, 0.002


def threads() -> set[int]:
    """Returns the idents of all threads."""
    return set(sys._current_frames())


def end_leftovers(before: set[int]) -> None:
    """Cancels the calls that wait in pools, ends pools of processes that still have work, and interrupts threads.

    A thread that runs only a library's code keeps running, as a server's does. So does a thread of `before`, unless a
    pool owns it.
    """
    pools: Any = sys.modules.get("concurrent.futures.thread")
    processes: Any = sys.modules.get("concurrent.futures.process")
    try:
        workers = {thread.ident for thread in pools._threads_queues} if pools is not None else set()
        for queue in set(pools._threads_queues.values()) if pools is not None else ():
            _cancel_all(queue)
            queue.put(None)  # its threads check whether their pool is shut down
        for manager in list(processes._threads_wakeups) if processes is not None else ():
            if manager.pending_work_items:
                for worker in list(manager.processes.values()):
                    worker.kill()
        ended = (before - workers) | {get_ident()}
        # The race: a pool's thread that has just taken a call runs no code of the program yet.
        for look in range(_LOOKS):
            waits = look == 0 and bool(workers)
            for ident, frame in sys._current_frames().items():
                if ident not in ended and _runs_program(frame):
                    _interrupt(ident)
                    ended.add(ident)
                elif ident in workers - ended:
                    waits = _begins_call(frame, pools._worker.__code__) or waits
            if not waits:
                return
            sleep(_LOOK_S)
    except Exception:  # noqa: BLE001 (the program may have replaced what this uses)
        return


def _cancel_all(queue: Any) -> None:
    for _ in range(queue.qsize()):
        try:
            item = queue.get_nowait()
        except Exception:  # noqa: BLE001 (_queue.Empty, or what the program made of it: a thread was quicker)
            return
        if item is not None:
            item.future.cancel()


def _begins_call(frame: Optional[FrameType], worker: CodeType) -> bool:
    """True for a pool's thread that may be about to run a call. Cancels a call that it has taken and not begun."""
    for _ in range(_MAX_FRAMES):
        if frame is None or frame.f_code is worker:
            item: Any = None if frame is None else frame.f_locals.get("work_item")
            return item is not None and not item.future.cancel() and item.future.running()
        frame = frame.f_back
    return False


def _runs_program(frame: Optional[FrameType]) -> bool:
    for _ in range(_MAX_FRAMES):
        if frame is None or frame.f_code.co_filename.startswith(_PROGRAMS):
            return frame is not None
        frame = frame.f_back
    return False


def _interrupt(ident: int) -> None:
    """Raises in a thread, as soon as it runs Python code."""
    import ctypes  # not at the start of a sandbox

    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(ExecutionInterrupted))
