"""The peers as a table: a row for each, a reason where there is no figure, and what each of them isolates."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from benchmarks.peers.run import FIGURES, UNITS, Measured
from benchmarks.table import machine, markdown_table, quantity, today

_LEGEND = "The factor beside a median is that to ours of the same kind, in the same turns."


def peers_markdown(found: Sequence[Measured], catalogue_day: date, load: float) -> str:
    """The table of docs/performance.md, which a terminal can show, too."""
    ours = {measured.peer.name: measured for measured in found}
    notes: dict[str, int] = {}
    figures = [figure for figure in FIGURES if any(_asked(measured, figure) for measured in found)]
    lines = [
        [
            f"{measured.peer.title} {measured.version}".strip(),
            *(_cell(measured, ours.get(measured.peer.beside), figure, notes) for figure in figures),
            measured.peer.isolates,
        ]
        for measured in found
    ]
    table = markdown_table(["", *figures, "isolates"], lines)
    reasons = [f"{number}. {reason}" for reason, number in notes.items()]
    failures = [
        f"- {measured.peer.title}: {len(texts)} turns of “{row}” failed: {texts[0]}"
        for measured in found
        for row, texts in measured.failures.items()
    ]
    heading = f"{machine()} ({load:.1f} before), {today()}; versions of {catalogue_day.isoformat()}. {_LEGEND}"
    return "\n".join([heading, "", table, "", *reasons, *([""] if reasons and failures else []), *failures])


def write_peers_json(found: Sequence[Measured], load: float, path: Path) -> None:
    listed = [
        {
            "name": measured.peer.name,
            "version": measured.version,
            "isolates": measured.peer.isolates,
            "samples": measured.samples,
            "reasons": measured.reasons,
        }
        for measured in found
    ]
    path.write_text(json.dumps({"machine": machine(), "day": today(), "load": load, "peers": listed}, indent=1) + "\n")


def _asked(measured: Measured, figure: str) -> bool:
    return figure in measured.samples or (figure in measured.reasons and not measured.peer.unavailable)


def _cell(measured: Measured, ours: Measured | None, figure: str, notes: dict[str, int]) -> str:
    samples = measured.samples.get(figure)
    if not samples:
        reason = measured.reasons.get(figure, "not measured in this run")
        return f"- ({notes.setdefault(reason, len(notes) + 1)})"
    typical = statistics.median(samples)
    text = quantity(typical, UNITS.get(figure, "ms"))
    beside = ours.samples.get(figure) if ours is not None and ours is not measured else None
    return f"{text} ({_factor(typical / statistics.median(beside))} x)" if beside else text


def _factor(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
