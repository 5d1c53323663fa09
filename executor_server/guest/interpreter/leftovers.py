"""Ends what a program that was stopped has queued in pools: their threads and processes would go on with it."""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def cancel_queued() -> None:
    """Cancels the calls that wait in thread pools, and ends process pools that still have work."""
    threads: Any = sys.modules.get("concurrent.futures.thread")
    processes: Any = sys.modules.get("concurrent.futures.process")
    try:
        for queue in set(threads._threads_queues.values()) if threads is not None else ():
            while not queue.empty():
                item = queue.get_nowait()
                if item is not None:
                    item.future.cancel()
            queue.put(None)  # its threads look whether their pool is shut down
        for manager in list(processes._threads_wakeups) if processes is not None else ():
            if manager.pending_work_items:
                for worker in list(manager.processes.values()):
                    worker.kill()
    except Exception:  # noqa: BLE001 (the program may have replaced what this uses, or a thread has emptied the queue)
        return
