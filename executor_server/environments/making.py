"""Makes one environment of a lock: a place, the builder's work, the list of files, the publication."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import TypeVar

from executor_server.core import Progress
from executor_server.environments.building import Builder, Built, Lock, OnProgress
from executor_server.environments.catalog import Catalog
from executor_server.environments.file_list import Walk, read_tree
from executor_server.environments.index import Request
from executor_server.environments.manifest import Manifest, list_of
from executor_server.environments.requester import current_requester
from executor_server.environments.store import Staging, Store, remove

T = TypeVar("T")


async def make_environment(
    catalog: Catalog, builder: Builder, lock: Lock, request: Request, on_progress: OnProgress
) -> None:
    """Makes the environment and publishes it. Leaves nothing half-made. Raises what `Builder.make` does."""
    store = catalog.store
    staging = store.stage()
    walk = Walk()
    try:
        built = await builder.make(lock, request.packages, request.target, staging.tree, on_progress)
        on_progress(Progress("checking"))
        manifest = await _to_its_end(walk, lambda: _recorded(store, staging, lock, built, request, walk, catalog.now()))
        store.publish(staging, manifest)
    except BaseException:
        await _to_its_end(walk, lambda: remove(staging.directory))
        raise
    catalog.accept(manifest)


def _recorded(
    store: Store, staging: Staging, lock: Lock, built: Built, request: Request, walk: Walk, created_s: float
) -> Manifest:
    """Lists what was made, and writes that beside it. Blocks."""
    listed = list_of(read_tree(staging.tree, walk))
    manifest = Manifest(
        lock=lock,
        modules=built.modules,
        pins=built.pins,
        size_bytes=built.size_bytes,
        created_s=created_s,
        requester=current_requester(),
        requirements=request.packages.requirements,
        files_sha256=hashlib.sha256(listed).hexdigest(),
    )
    store.write(staging, manifest, listed)
    return manifest


async def _to_its_end(walk: Walk, function: Callable[[], T]) -> T:
    """Runs a function in a thread. When the caller is cancelled, the walk is stopped and the thread waited for."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        walk.is_stopped = True
        await asyncio.gather(running, return_exceptions=True)
        raise
