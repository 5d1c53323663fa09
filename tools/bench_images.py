"""Builds the images that the benchmarks compare with: `make bench-images`."""

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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="", help="image to build on")
    base = parser.parse_args().base
    try:
        require_engine()
        with exclusive(CACHE):
            builder = Builder(CACHE, base, metadata.version("remote-executor"))
            plain = builder.build(RECIPES / "base", Bases(base).with_packages(RECIPES / "data"), "remote-executor/base")
            for name in ("jupyter", "peers"):
                builder.build(ROOT / "benchmarks/reference" / name, plain, f"remote-executor-bench/{name}")
    except BuildFailure as failure:
        print(f"images: {failure}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
