"""Figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figures import Figure, quantile

TABLE_COLUMNS = 160
_LONG_MS = 10_000


HEADINGS = ("figure", "p50", "p99", "min - max", "reference", "p50", "ratio", "aim", "")
_TEXT_COLUMNS = (0, 4, 8)
_CAPTION = "Compared is the median (p50) of each side; where a figure says so, its smallest sample (best) or its p99."


def print_table(figures: Sequence[Figure]) -> None:
    """One row for each figure; on a pipe as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    table = Table(title=machine(), title_justify="left", caption=_CAPTION, caption_justify="left")
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
    for figure in figures:
        *cells, verdict = _cells(figure)
        colour = "red" if figure.met is False else "green"
        table.add_row(*cells, f"[{colour}]{verdict}[/]")
    console.print(table)


def print_markdown(figures: Sequence[Figure]) -> None:
    """The same table, as docs/performance.md records one."""
    print(f"{machine()}\n")
    rows = [HEADINGS, ["---"] * len(HEADINGS), *(_cells(figure) for figure in figures)]
    for row in rows:
        print("| " + " | ".join(row) + " |")


def _cells(figure: Figure) -> list[str]:
    ratio, reference = figure.ratio, figure.reference_typical
    return [
        figure.name + (" (best)" if figure.by_best else " (p99)" if figure.by_p99 else ""),
        _quantity(statistics.median(figure.samples) if figure.by_p99 else figure.typical, figure.unit),
        _quantity(quantile(figure.samples, 0.99), figure.unit),
        f"{_number(min(figure.samples))} - {_number(max(figure.samples))}",
        figure.reference.name if figure.reference is not None else "",
        _quantity(reference, figure.unit) if reference is not None else "",
        f"{ratio:.2f}" if ratio is not None else "",
        str(figure.aim) if figure.aim is not None else "",
        {True: "ok", False: "no", None: ""}[figure.met],
    ]


def _quantity(value: float, unit: str) -> str:
    if unit == "ms" and value >= _LONG_MS:
        return f"{_number(value / 1000)} s"
    return f"{_number(value)} {unit}"


def _number(value: float) -> str:
    """Three digits, since no figure here is good for more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write_json(figures: Sequence[Figure], path: Path) -> None:
    """Every sample, so that runs can be compared later."""
    listed = [
        {
            "name": figure.name,
            "unit": figure.unit,
            "typical": figure.typical,
            "samples": figure.samples,
            "reference": figure.reference.name if figure.reference is not None else None,
            "reference_typical": figure.reference_typical,
            "reference_samples": figure.reference.samples if figure.reference is not None else None,
            "ratio": figure.ratio,
            "aim": str(figure.aim) if figure.aim is not None else None,
            "met": figure.met,
        }
        for figure in figures
    ]
    path.write_text(json.dumps({"machine": machine(), "figures": listed}, indent=1) + "\n")


def machine() -> str:
    """The machine on which the figures were taken."""
    return (
        f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} processors, "
        f"{platform.python_implementation()} {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
