"""Builds images that are not shipped: `make bench-images` those to compare with, `make test-images` one for tests."""

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
NETWORK_RECIPE = ROOT / "tests/support/network_image"


def build_bench(builder: Builder, base: str) -> None:
    """Builds the images of other projects, for the benchmarks."""
    plain = builder.build(RECIPES / "base", Bases(base).with_packages(RECIPES / "data"), "remote-executor/base")
    for name in ("jupyter", "peers"):
        builder.build(ROOT / "benchmarks/reference" / name, plain, f"remote-executor-bench/{name}")


def build_test(builder: Builder, base: str) -> None:
    """Builds the image for the tests of sandboxes with a network."""
    plain = builder.build(RECIPES / "base", Bases(base).with_packages(NETWORK_RECIPE), "remote-executor-tests/base")
    builder.build(NETWORK_RECIPE, plain, "remote-executor-tests/network")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("images", choices=("bench", "test"))
    parser.add_argument("--base", default="", help="image to build on")
    options = parser.parse_args()
    build = {"bench": build_bench, "test": build_test}[options.images]
    try:
        require_engine()
        with exclusive(CACHE):
            build(Builder(CACHE, options.base, metadata.version("remote-executor")), options.base)
    except BuildFailure as failure:
        print(f"images: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
