"""Makes one environment of a lock: a place, the builder's work, the list of files, the publication."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection

import structlog

from executor_server.core import EnvironmentFailed, Progress
from executor_server.environments.building import Builder, Built, Lock, OnProgress
from executor_server.environments.catalog import Catalog
from executor_server.environments.disk_use import archives_with
from executor_server.environments.file_list import Walk, read_tree, to_its_end
from executor_server.environments.index import Request
from executor_server.environments.manifest import Manifest, list_of
from executor_server.environments.recorded import FilesDamaged
from executor_server.environments.requester import current_requester
from executor_server.environments.store import Staging, Store, remove

_log = structlog.get_logger(__name__)


async def make_environment(
    catalog: Catalog, builder: Builder, lock: Lock, request: Request, on_progress: OnProgress
) -> None:
    """Makes the environment and publishes it. Leaves nothing half-made. Raises what `Builder.make` does."""
    try:
        await _make(catalog, builder, lock, request, on_progress)
    except FilesDamaged as damaged:
        # Rare, as it takes a damaged disk. Another build that links from there meanwhile fails, and may be repeated.
        _log.error("cache_damaged", environment_id=lock.environment_id, packages=damaged.infos, error=str(damaged))
        await asyncio.to_thread(_discard, catalog.store, damaged.infos)
        try:
            await _make(catalog, builder, lock, request, on_progress)
        except FilesDamaged as again:
            raise EnvironmentFailed(
                f"the environment of these packages is refused: {again}, though it was fetched again"
            ) from again


def _discard(store: Store, infos: Collection[str]) -> None:
    """Removes the archives of the cache that have these packages, which uv then fetches again. Blocks."""
    for archive in archives_with(store.places, infos):
        store.discard(archive)


async def _make(catalog: Catalog, builder: Builder, lock: Lock, request: Request, on_progress: OnProgress) -> None:
    store = catalog.store
    staging = store.stage()
    walk = Walk()
    try:
        built = await builder.make(lock, request.packages, request.target, staging.tree, on_progress)
        on_progress(Progress("checking"))
        manifest = await to_its_end(walk, lambda: _recorded(store, staging, lock, built, request, walk, catalog.now()))
        store.publish(staging, manifest)
    except BaseException:
        await to_its_end(walk, lambda: remove(staging.directory))
        raise
    catalog.accept(manifest)


def _recorded(
    store: Store, staging: Staging, lock: Lock, built: Built, request: Request, walk: Walk, created_s: float
) -> Manifest:
    """Lists what was made, and writes that beside it. Blocks."""
    listed = list_of(read_tree(staging.tree, walk, built.digests))
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
