"""`python -m benchmarks`: measures and prints the table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from benchmarks.bench import Effort, running_bench
from benchmarks.measuring import Row, measure
from benchmarks.page import write_section
from benchmarks.rows import MEASUREMENTS
from benchmarks.table import markdown, print_table, write_json

_APART = ("flood", "egress", "packages", "fleet-", "docker-flood")
"""Beginnings of the names of long rows that docs/performance.md has in sections of their own."""


@click.command()
@click.option("--only", type=click.Choice(list(MEASUREMENTS)), multiple=True, help="Measure this alone; repeatable.")
@click.option("--all", "with_all", is_flag=True, help="Hold 1,000 live sessions in the row `live`, not 600.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all samples there.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the table as docs/performance.md has it.")
@click.option("--write", is_flag=True, help="Write it there, of all rows but those that have sections of their own.")
def main(only: tuple[str, ...], with_all: bool, json_path: Path | None, as_markdown: bool, write: bool) -> None:
    """Measures the executor beside its references.

    A row that can't be measured is named below the table with the reason. Fails when a row failed.
    """
    if write and only:
        raise click.UsageError("--write is for the whole table, --only for a part of it")
    load = os.getloadavg()[0]
    rows: list[Row] = []
    try:
        with running_bench(Effort(sessions=1_000) if with_all else Effort()) as bench:
            for name in MEASUREMENTS:
                if name in only or (not only and not (write and name.startswith(_APART))):
                    print(f"measuring: {name}", file=sys.stderr, flush=True)
                    rows.append(measure(bench, name))
                    if rows[-1].missing:
                        print(f"{name}: {rows[-1].missing}", file=sys.stderr, flush=True)
    finally:  # interrupted, or a daemon that does not stop as it should: what was measured counts
        if as_markdown:
            print(markdown(rows, load))
        else:
            print_table(rows)
        if json_path is not None:
            write_json(rows, json_path)
    if write:
        write_section("bench", markdown(rows, load))
    if any(row.failed for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
