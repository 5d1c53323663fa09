"""Writes the table of metrics in docs/operations.md, from the metrics themselves.

    python tools/metrics_docs.py [--check]

`--check` writes nothing, and fails when the table is not what would be written.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pages import between_marks, write_or_check

from executor_server.telemetry.metrics import Metrics
from executor_server.telemetry.sources import DESCRIBED

TARGET = Path(__file__).parents[1] / "docs/operations.md"
BEGIN, END = "<!-- metrics: made by tools/metrics_docs.py -->\n", "<!-- end of metrics -->\n"


def _rows() -> Iterator[str]:
    metrics = Metrics(version="", backend="", methods=())
    yield "| Metric | Kind | Labels | Meaning |"
    yield "|---|---|---|---|"
    for entry in sorted((*metrics.described, *DESCRIBED), key=lambda entry: entry.name):
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        yield f"| `{entry.name}` | {entry.kind} | {labels} | {entry.meaning} |"


if __name__ == "__main__":
    write_or_check(TARGET, between_marks(TARGET, BEGIN, END, _rows()))
