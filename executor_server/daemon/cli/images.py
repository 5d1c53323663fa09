"""`executor-server images`: builds the images of the Docker backend's sandboxes, and the daemon's own."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import click

from executor_server.daemon.cli.shared import EXIT_HOST, fail


@click.group()
def images() -> None:
    """Images for the Docker backend."""


@images.command()
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--base", default="", metavar="IMAGE", help="Build on this image. Default: python:3.11-slim-bookworm.")
@click.option(
    "--cache",
    type=click.Path(path_type=Path, file_okay=False),
    help="Cache of downloads. Default: $XDG_CACHE_HOME/remote-executor/images.",
)
def build(names: tuple[str, ...], base: str, cache: Path | None) -> None:
    """Builds base, data and browser, or the named images, and tests each in a sandbox.

    Further names: daemon, the daemon itself; demo, an agent that tries it.
    """
    from executor_server.daemon.cli.image_building.build import (
        DAEMON_IMAGES,
        SANDBOX_IMAGES,
        Builder,
        BuildFailure,
        exclusive,
        require_engine,
    )
    from executor_server.daemon.cli.image_building.probe import probe_all

    known = (*SANDBOX_IMAGES, *DAEMON_IMAGES)
    if unknown := sorted(set(names) - set(known)):
        raise click.UsageError(f"no image {', '.join(unknown)}; available: {', '.join(known)}")
    wanted = set(names or SANDBOX_IMAGES)
    place = (cache or _default_cache()).absolute()
    try:
        require_engine()
        with exclusive(place):
            Builder(place, base, metadata.version("remote-executor")).build_all(wanted)
        tried = probe_all([name for name in SANDBOX_IMAGES if name in {"base", *wanted}])
    except BuildFailure as failure:
        fail(EXIT_HOST, f"images: {failure}")
    if not tried:
        raise SystemExit(EXIT_HOST)


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "remote-executor" / "images"
