"""A comparison as a table for people, as markdown for docs/performance.md, and as JSON for programs."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.compare.comparison import Comparison, Pair, Verdict
from benchmarks.figures import Figure, to_json
from benchmarks.table import TABLE_COLUMNS, machine, markdown_table, quantity, title, today

_COLOURS = {Verdict.WORSE: "red", Verdict.BETTER: "green", Verdict.NONE: "default"}
_METHOD = (
    "The ratio is the median of the rounds' ratios, each of two turns that followed each other; in brackets is its "
    "interval of 95 % by ranks (the sign test's: it assumes no distribution, and outliers move it by a rank at most)."
)


def print_report(comparison: Comparison, load: float) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    table = Table(title=_heading(comparison, load), title_justify="left", caption=_METHOD, caption_justify="left")
    for column, heading in enumerate(_headings(comparison)):
        table.add_column(heading, justify="left" if column in (0, 6) else "right", no_wrap=True)
    for pair in comparison.pairs:
        colour = _COLOURS[pair.verdict]
        table.add_row(*(f"[{colour}]{escape(cell)}[/]" for cell in _cells(pair)))
    console.print(table)
    for line in remarks(comparison):
        print(line)


def report_markdown(comparison: Comparison, load: float) -> str:
    table = markdown_table(_headings(comparison), [_cells(pair) for pair in comparison.pairs])
    lines = [f"- {line}" for line in remarks(comparison)]
    return "\n".join([f"{_heading(comparison, load)}. {_METHOD}", "", table, "", *lines])


def remarks(comparison: Comparison) -> list[str]:
    """A line for each figure that is worse by more than its noise, and for all that was not compared."""
    lines = [
        f"worse by more than its noise: {title(pair.head)}, {_ratio(pair)}"
        for pair in comparison.pairs
        if pair.verdict is Verdict.WORSE
    ]
    if comparison.pairs and not lines:
        lines.append("no figure is worse by more than its noise")
    lines += [f"not compared, or not all of it: {row}: {reason}" for row, reason in comparison.missing.items()]
    if comparison.differences:
        lines.append(f"packages that differ: {'; '.join(comparison.differences)}")
    return lines


def write_report_json(comparison: Comparison, load: float, path: Path) -> None:
    written = {
        "machine": machine(),
        "day": today(),
        "load": load,
        "base": comparison.base,
        "head": comparison.head,
        "rounds": comparison.rounds,
        "pairs": [
            {
                "base": to_json(pair.base),
                "head": to_json(pair.head),
                "ratios": pair.ratios,
                "ratio": pair.ratio,
                "interval": [pair.interval.low, pair.interval.high] if pair.interval else None,
                "verdict": pair.verdict.value,
            }
            for pair in comparison.pairs
        ],
        "missing": dict(comparison.missing),
    }
    path.write_text(json.dumps(written, indent=1) + "\n")


def _heading(comparison: Comparison, load: float) -> str:
    return (
        f"{comparison.head} beside {comparison.base}, {comparison.rounds} rounds in {comparison.took_s:.0f} s, "
        f"{today()}; "
        f"{machine()} ({load:.1f} before)"
    )


def _headings(comparison: Comparison) -> tuple[str, ...]:
    base, head = comparison.base.split()[0], comparison.head.split()[0]
    if base == head:
        base, head = f"{base} as recorded", f"{head} here"
    return ("figure", base, head, "ratio", "[95 %]", "", "reference", f"{base}, x", f"{head}, x", "aim", "")


def _cells(pair: Pair) -> list[str]:
    interval, aim = pair.interval, pair.head.aim
    return [
        title(pair.head),
        quantity(pair.base.typical, pair.base.unit),
        quantity(pair.head.typical, pair.head.unit),
        f"{pair.ratio:.2f}",
        f"[{interval.low:.2f} - {interval.high:.2f}]" if interval else "too few",
        pair.verdict.value,
        pair.head.reference.name if pair.head.reference else "",
        _beside(pair.base),
        _beside(pair.head),
        str(aim) if aim else "",
        {True: "ok", False: "no", None: ""}[pair.head.met],
    ]


def _beside(figure: Figure) -> str:
    return f"{figure.ratio:.2f}" if figure.ratio is not None else ""


def _ratio(pair: Pair) -> str:
    interval = pair.interval
    assert interval is not None, "there is no verdict without one"
    return f"{pair.ratio:.2f} x ({interval.low:.2f} - {interval.high:.2f})"
