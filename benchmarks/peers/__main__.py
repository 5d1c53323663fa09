"""`python -m benchmarks.peers`: the alternatives that a user would pick, in turns with ours."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import click

from benchmarks.page import write_section
from benchmarks.peers.environments import read_catalogue
from benchmarks.peers.report import peers_markdown, write_peers_json
from benchmarks.peers.run import ROWS, Measured, measure_peers

_CATALOGUE = read_catalogue()


@click.command()
@click.option("--only", type=click.Choice([row.name for row in ROWS]), multiple=True, help="Measure this row alone.")
@click.option("--peer", type=click.Choice([peer.name for peer in _CATALOGUE.peers]), multiple=True, help="Only these.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all samples there.")
@click.option("--write", is_flag=True, help="Write the table to docs/performance.md; not with --only or --peer.")
def main(only: tuple[str, ...], peer: tuple[str, ...], json_path: Path | None, write: bool) -> None:
    """Measures the peers of peers.toml and this project in turns, and prints the table of docs/performance.md."""
    if write and (only or peer):
        raise click.UsageError("--write is for the whole table, --only and --peer for a part of it")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    load = os.getloadavg()[0]
    found = [Measured(each) for each in _CATALOGUE.peers if not peer or each.name in peer]
    rows = [row for row in ROWS if not only or row.name in only]
    try:
        measure_peers(found, rows, say=lambda text: print(text, file=sys.stderr, flush=True))
    finally:  # interrupted: what was measured counts
        print(peers_markdown(found, _CATALOGUE.day, load))
        if json_path is not None:
            write_peers_json(found, load, json_path)
    if write:
        write_section("bench-peers", peers_markdown(found, _CATALOGUE.day, load))


if __name__ == "__main__":
    main()
