"""Fetches images from their registries in the background; a session that needs one gets an error that says to retry.

There is one fetch for each image, bounded in time, on a thread that dies with the daemon: the SDK reads the progress
without a time limit, and a registry may be silent for minutes. A fetch that failed is not repeated at once.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from executor_server.backends.docker.engine import EngineFailure
from executor_server.core import ImageNotReady

_RETRY_S = 5.0
_FAILURE_KEPT_S = 60.0
_LOG_INTERVAL_S = 15.0
_CONCURRENT_FETCHES = 4
_ABANDON_TIMEOUT_S = 1.0
_LAYERS = 1024
_UNKNOWN_TO_REGISTRY = (401, 403, 404)
# The messages of a registry or a proxy are for the operator: they may name hosts that a client must not know.
_SEE_THE_LOG = "the daemon's log says why"

_log = structlog.get_logger(__name__)


@dataclass
class _Fetch:
    """One fetch: its thread writes and the event loop reads, one field at a time."""

    reference: str
    deadline: float
    percent: int | None = None
    failure: str = ""
    ended_at: float | None = None
    abandoned: bool = False
    thread: threading.Thread | None = None


class Pulls:
    """Owns the fetches."""

    def __init__(self, pull: Callable[[str], Iterator[Mapping[str, Any]]], timeout_s: float) -> None:
        self._pull = pull
        self._timeout_s = timeout_s
        self._fetches: dict[str, _Fetch] = {}

    def fetch(self, name: str, reference: str) -> ImageNotReady:
        """Begins to fetch an image that the host lacks, unless that is under way; returns the error for the client."""
        fetch = self._fetches.get(reference)
        if fetch is not None and fetch.ended_at is None and time.monotonic() > fetch.deadline:
            fetch.failure, fetch.ended_at, fetch.abandoned = _too_slow(self._timeout_s), time.monotonic(), True
        if fetch is not None and fetch.ended_at is not None:
            wait_s = fetch.ended_at + _FAILURE_KEPT_S - time.monotonic()
            if fetch.failure and wait_s > 0:
                return ImageNotReady(f"image {name!r} could not be fetched: {fetch.failure}", retry_after_s=wait_s)
            fetch = None
        if fetch is None:
            if sum(_is_alive(other) for other in self._fetches.values()) >= _CONCURRENT_FETCHES:
                return ImageNotReady(f"image {name!r} waits for others to be fetched", retry_after_s=_RETRY_S)
            fetch = self._begin(reference)
        progress = "" if fetch.percent is None else f", {fetch.percent} %"
        return ImageNotReady(f"image {name!r} is being fetched{progress}", retry_after_s=_RETRY_S)

    async def close(self) -> None:
        """Abandons the running fetches. A thread that gets nothing from the Engine ends with the process."""
        for fetch in self._fetches.values():
            fetch.abandoned = True
        threads = [fetch.thread for fetch in self._fetches.values() if fetch.thread is not None]
        await asyncio.gather(*(asyncio.to_thread(thread.join, _ABANDON_TIMEOUT_S) for thread in threads))

    def _begin(self, reference: str) -> _Fetch:
        fetch = _Fetch(reference, time.monotonic() + self._timeout_s)
        fetch.thread = threading.Thread(target=self._run, args=(fetch,), name=f"pull {reference}", daemon=True)
        self._fetches[reference] = fetch
        fetch.thread.start()
        return fetch

    def _run(self, fetch: _Fetch) -> None:
        _log.info("image_pull_begun", reference=fetch.reference)
        try:
            self._follow(fetch)
        except EngineFailure as failure:
            unknown = failure.status in _UNKNOWN_TO_REGISTRY
            fetch.failure = "its registry has no such image, or wants a login" if unknown else _SEE_THE_LOG
            _log.warning("image_pull_failed", reference=fetch.reference, reason=str(failure))
        except Exception:  # noqa: BLE001 - the border of this thread: the error would be lost
            fetch.failure = _SEE_THE_LOG
            _log.exception("image_pull_failed", reference=fetch.reference)
        else:
            _log.info("image_pull_ended", reference=fetch.reference, abandoned=fetch.abandoned)
        finally:
            fetch.ended_at = fetch.ended_at or time.monotonic()

    def _follow(self, fetch: _Fetch) -> None:
        layers: dict[str, tuple[int, int]] = {}
        logged_at = time.monotonic()
        for line in self._pull(fetch.reference):
            if fetch.abandoned:
                return
            now = time.monotonic()
            if now > fetch.deadline:
                fetch.failure = _too_slow(self._timeout_s)
                return
            _note_progress(layers, line)
            if layers:
                here, whole = (sum(amounts) for amounts in zip(*layers.values(), strict=True))
                fetch.percent = 100 * here // max(whole, 1)
            if now - logged_at >= _LOG_INTERVAL_S:
                logged_at = now
                _log.info("image_pull_progress", reference=fetch.reference, percent=fetch.percent)


def _note_progress(layers: dict[str, tuple[int, int]], line: Mapping[str, Any]) -> None:
    """Records how much of a layer has arrived. A layer that is being unpacked has arrived."""
    layer, status, progress = line.get("id"), line.get("status"), line.get("progressDetail") or {}
    if not isinstance(layer, str) or (layer not in layers and len(layers) >= _LAYERS):
        return
    if status == "Downloading" and progress.get("total"):
        layers[layer] = (int(progress["current"]), int(progress["total"]))
    elif status in ("Download complete", "Extracting", "Pull complete") and layer in layers:
        layers[layer] = (layers[layer][1], layers[layer][1])


def _is_alive(fetch: _Fetch) -> bool:
    return fetch.thread is not None and fetch.thread.is_alive()


def _too_slow(timeout_s: float) -> str:
    return f"it took longer than {timeout_s:g} s"
