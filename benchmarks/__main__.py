"""`python -m benchmarks`: measures and prints the table."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from benchmarks.bench import running_bench
from benchmarks.figures import Figure
from benchmarks.references import Unmeasurable
from benchmarks.rows import MEASUREMENTS
from benchmarks.table import print_markdown, print_table, write_json


@click.command()
@click.option("--only", type=click.Choice(list(MEASUREMENTS)), multiple=True, help="Measure this alone; repeatable.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all samples there.")
@click.option("--markdown", is_flag=True, help="Print the table as docs/performance.md has it.")
def main(only: tuple[str, ...], json_path: Path | None, markdown: bool) -> None:
    """Measures the executor beside its references. Takes about seven minutes, three without an Engine."""
    figures: list[Figure] = []
    with running_bench() as bench:
        for name, measurement in MEASUREMENTS.items():
            if not only or name in only:
                print(f"measuring: {name}", file=sys.stderr, flush=True)
                try:
                    figures.extend(measurement(bench))
                except Unmeasurable as reason:
                    if only:
                        raise click.ClickException(f"{name}: {reason}") from reason
                    print(f"left out: {reason}", file=sys.stderr)
    (print_markdown if markdown else print_table)(figures)
    if json_path is not None:
        write_json(figures, json_path)


main()
