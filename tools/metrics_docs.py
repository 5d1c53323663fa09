"""Writes the table of metrics in docs/operations.md, from the metrics themselves.

    python tools/metrics_docs.py [--check]

`--check` writes nothing, and fails when the table is not what would be written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from executor_server.metrics import Metrics
from executor_server.metrics_sources import DESCRIBED

TARGET = Path(__file__).parents[1] / "docs/operations.md"
BEGIN, END = "<!-- metrics: made by tools/metrics_docs.py -->\n", "<!-- end of metrics -->\n"


def document() -> str:
    """The page as it should be."""
    before, _, rest = TARGET.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + "\n".join(_rows()) + "\n\n" + END + after


def _rows() -> Iterator[str]:
    metrics = Metrics(version="", backend="", methods=())
    yield "| Metric | Kind | Labels | Meaning |"
    yield "|---|---|---|---|"
    for entry in sorted((*metrics.described, *DESCRIBED), key=lambda entry: entry.name):
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        yield f"| `{entry.name}` | {entry.kind} | {labels} | {entry.meaning} |"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(document())
        return 0
    if TARGET.read_text() == document():
        return 0
    sys.stderr.write(f"{TARGET} is not what tools/metrics_docs.py makes: run it.\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
