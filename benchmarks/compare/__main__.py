"""`python -m benchmarks.compare [BASE]`: the rows of two commits, in turns."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from benchmarks.bench import Effort
from benchmarks.compare.comparison import compare
from benchmarks.compare.report import print_report, report_markdown, write_report_json
from benchmarks.compare.sides import RECORDED, NoSide, commit_side, recorded_commit, resolved, working_side
from benchmarks.line_process import WorkerFailure
from benchmarks.page import write_section
from benchmarks.rows import MEASUREMENTS
from benchmarks.table import today

QUICK = ("execute", "tool", "session", "lines", "array", "mixed", "memory")
"""Rows of the quick comparison: about a minute and a quarter with both sides."""

_LEFT_OUT = ("local", "flood", "egress", "packages", "fleet", "docker-executor", "docker-burst", "docker-flood")
_SLOW = ("journal", "recovery", "docker-recovery", "docker-preload", "live")
USUAL = tuple(name for name in MEASUREMENTS if not name.startswith(_LEFT_OUT) and name not in _SLOW)
"""Rows of the full comparison: only ours, and only those for which a few samples suffice. `--only` takes any."""

# A turn takes a tenth of what `make bench` does; the quick one runs programs of a tenth of the size, too.
_QUICK_EFFORT, _USUAL_EFFORT = Effort(samples=0.1, programs=0.1), Effort(samples=0.1, programs=0.3)
_QUICK_ROUNDS, _USUAL_ROUNDS = 10, 12
_QUICK_S, _USUAL_S = 90.0, 1500.0


@click.command()
@click.argument("base", required=False, default="")
@click.option("--head", default="", help="Commit to compare; the working tree when it is left out.")
@click.option("--only", type=click.Choice(list(MEASUREMENTS)), multiple=True, help="Compare this alone; repeatable.")
@click.option("--quick", is_flag=True, help="A few rows, in little more than a minute.")
@click.option("--rounds", type=click.IntRange(1, 200), help="Times that each side has its turn; an interval takes six.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all samples there.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/performance.md has it.")
@click.option("--write", is_flag=True, help="Write it there; not with --only or --quick.")
@click.option("--record", is_flag=True, help="Compare nothing: record the commit as the one to compare with.")
def main(
    base: str,
    head: str,
    only: tuple[str, ...],
    quick: bool,
    rounds: int | None,
    json_path: Path | None,
    markdown: bool,
    write: bool,
    record: bool,
) -> None:
    """Compares this tree with BASE, or with the commit that was recorded last, in turns on this machine.

    Each side has the client, the daemon and an environment of its own commit. Nothing passes or fails: where there is
    no such commit, or a row can't be measured, that is said.
    """
    if write and (only or quick):
        raise click.UsageError("--write is for the whole table, --only and --quick for a part of it")
    # As an interrupt does: on the way out it ends what it started.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    try:
        if record:
            _record(resolved(base or "HEAD"))
            return
        base_side = commit_side(base or recorded_commit())
        head_side = commit_side(head) if head else working_side()
    except NoSide as reason:
        print(f"nothing to compare with: {reason}")
        return
    load = os.getloadavg()[0]
    try:
        comparison = compare(
            base_side,
            head_side,
            only or (QUICK if quick else USUAL),
            effort=_QUICK_EFFORT if quick else _USUAL_EFFORT,
            rounds=rounds or (_QUICK_ROUNDS if quick else _USUAL_ROUNDS),
            time_s=_QUICK_S if quick else _USUAL_S,
            say=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except WorkerFailure as reason:
        print(f"nothing to compare: {reason}")
        return
    if markdown:
        print(report_markdown(comparison, load))
    else:
        print_report(comparison, load)
    if write:
        write_section("bench-compare", report_markdown(comparison, load))
    if json_path is not None:
        write_report_json(comparison, load, json_path)


def _record(commit: str) -> None:
    RECORDED.write_text(f"# The commit whose figures docs/performance.md has.\n{commit} {today()}\n")
    print(f"recorded: {commit}")


if __name__ == "__main__":
    main()
