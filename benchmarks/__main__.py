"""`python -m benchmarks`: measures and prints the table."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.bench import running_bench
from benchmarks.measuring import Row, measure
from benchmarks.rows import MEASUREMENTS
from benchmarks.table import print_markdown, print_table, write_json


@click.command()
@click.option("--only", type=click.Choice(list(MEASUREMENTS)), multiple=True, help="Measure this alone; repeatable.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all samples there.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/performance.md has it.")
def main(only: tuple[str, ...], json_path: Path | None, markdown: bool) -> None:
    """Measures the executor beside its references. Takes about ten minutes, five without an Engine.

    A row that can't be measured is named below the table with the reason. Fails when a row failed.
    """
    rows: list[Row] = []
    try:
        with running_bench() as bench:
            for name in MEASUREMENTS:
                if not only or name in only:
                    print(f"measuring: {name}", file=sys.stderr, flush=True)
                    rows.append(measure(bench, name))
                    if rows[-1].missing:
                        print(f"{name}: {rows[-1].missing}", file=sys.stderr, flush=True)
    finally:  # interrupted, or a daemon that does not stop as it should: what was measured counts
        (print_markdown if markdown else print_table)(rows)
        if json_path is not None:
            write_json(rows, json_path)
    if any(row.failed for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
