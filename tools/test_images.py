"""Builds the image of the tests of sandboxes with a network: `make test-images`."""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path

from executor_server.daemon.cli.image_building.build import (
    RECIPES,
    Bases,
    Builder,
    BuildFailure,
    exclusive,
    require_engine,
)

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "images"
RECIPE = ROOT / "tests/support/network_image"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="", help="image to build on")
    base = parser.parse_args().base
    try:
        require_engine()
        with exclusive(CACHE):
            builder = Builder(CACHE, base, metadata.version("remote-executor"))
            bare = Bases(base).with_packages(RECIPE)
            plain = builder.build(RECIPES / "base", bare, "remote-executor-tests/base")
            builder.build(RECIPE, plain, "remote-executor-tests/network")
    except BuildFailure as failure:
        print(f"images: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
