"""Figures as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.figures import Figure, quantile, to_json
from benchmarks.measuring import Row

TABLE_COLUMNS = 160
_LONG_MS = 10_000


HEADINGS = ("figure", "p50", "p99", "min - max", "reference", "p50", "ratio", "aim", "")
_TEXT_COLUMNS = (0, 4, 8)
_CAPTION = "Compared is the median (p50) of each side; where a figure says so, its smallest sample (best) or its p99."


def print_table(rows: Sequence[Row]) -> None:
    """One row for each figure, and a line for what is missing; on a pipe as wide as it needs to be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    table = Table(title=machine(), title_justify="left", caption=_CAPTION, caption_justify="left")
    for column, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if column in _TEXT_COLUMNS else "right", no_wrap=True)
    for figure in figures_of(rows):
        *cells, verdict = _cells(figure)
        colour = "red" if figure.met is False else "green"
        table.add_row(*map(escape, cells), f"[{colour}]{verdict}[/]")
    console.print(table)
    for line in _missing(rows):
        print(line)


def markdown(rows: Sequence[Row], load: float) -> str:
    """The same table, as docs/performance.md records one."""
    table = markdown_table(HEADINGS, [_cells(figure) for figure in figures_of(rows)])
    missing = [f"- {line}" for line in _missing(rows)]
    return "\n".join([f"{machine()} ({load:.1f} before), {today()}.", "", table, *(["", *missing] if missing else [])])


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
        for cells in (headings, ["---"] * len(headings), *lines)
    )


def figures_of(rows: Sequence[Row]) -> list[Figure]:
    return [figure for row in rows for figure in row.figures]


def _missing(rows: Sequence[Row]) -> list[str]:
    return [f"{row.name}: {row.missing}" for row in rows if row.missing]


def _cells(figure: Figure) -> list[str]:
    ratio, reference = figure.ratio, figure.reference_typical
    return [
        title(figure),
        quantity(statistics.median(figure.samples) if figure.by_p99 else figure.typical, figure.unit),
        quantity(quantile(figure.samples, 0.99), figure.unit),
        f"{_number(min(figure.samples))} - {_number(max(figure.samples))}",
        figure.reference.name if figure.reference is not None else "",
        quantity(reference, figure.unit) if reference is not None else "",
        f"{ratio:.2f}" if ratio is not None else "",
        str(figure.aim) if figure.aim is not None else "",
        {True: "ok", False: "no", None: ""}[figure.met],
    ]


def title(figure: Figure) -> str:
    """Its name, and the sample that is compared where that is not the median."""
    return figure.name + (" (best)" if figure.by_best else " (p99)" if figure.by_p99 else "")


def quantity(value: float, unit: str) -> str:
    if unit == "ms" and value >= _LONG_MS:
        return f"{_number(value / 1000)} s"
    return f"{_number(value)} {unit}"


def _number(value: float) -> str:
    """Three digits, since no figure here is good for more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def write_json(rows: Sequence[Row], path: Path) -> None:
    """Every sample, so that runs can be compared later."""
    listed = [
        {
            **to_json(figure),
            "typical": figure.typical,
            "reference_typical": figure.reference_typical,
            "ratio": figure.ratio,
            "met": figure.met,
        }
        for figure in figures_of(rows)
    ]
    missing = {row.name: row.missing for row in rows if row.missing}
    written = {"machine": machine(), "day": today(), "figures": listed, "missing": missing}
    path.write_text(json.dumps(written, indent=1) + "\n")


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def machine() -> str:
    """The machine on which the figures were taken."""
    return (
        f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} processors, "
        f"{platform.python_implementation()} {platform.python_version()}, load {os.getloadavg()[0]:.1f}"
    )
