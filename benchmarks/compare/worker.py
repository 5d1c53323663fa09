"""The process of one side: rows are measured with the client and the daemon of the environment that it runs in."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
from importlib import metadata
from typing import Any

from benchmarks.bench import Bench, Effort, running_bench
from benchmarks.figures import to_json
from benchmarks.measuring import measure

PACKAGES = (
    "grpcio",
    "protobuf",
    "uvloop",
    "numpy",
    "pandas",
    "pillow",
    "matplotlib",
    "pydantic",
    "structlog",
    "psutil",
)
"""Packages whose versions affect figures."""


def main() -> None:
    samples, programs = map(float, sys.argv[1:])
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # rows may print, which must not mix with answers
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with running_bench(Effort(samples, programs)) as bench:
        for line in sys.stdin:
            print(json.dumps(_answered(bench, json.loads(line))), file=answers)


def _answered(bench: Bench, request: dict[str, Any]) -> dict[str, Any]:
    if "row" not in request:
        return _versions()
    row = measure(bench, request["row"])
    return {"figures": [to_json(figure) for figure in row.figures], "missing": row.missing}


def _versions() -> dict[str, str]:
    found = {"CPython": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    main()
