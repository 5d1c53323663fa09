"""Runs a world for another process, which need not be a test: `python -m tests.support.internet`.

It prints one line of JSON with what one needs to know of it, and lives until its standard input ends.
"""

from __future__ import annotations

import json
import sys

from tests.support.internet.world import open_internet
from tests.support.own_addresses import why_no_addresses


def main() -> None:
    if reason := why_no_addresses():
        sys.exit(reason)
    with open_internet() as world:
        facts = {"address": world.address, "ca_file": str(world.ca_file), "config": world.config()}
        print(json.dumps(facts), flush=True)  # noqa: T201
        sys.stdin.read()


if __name__ == "__main__":
    main()
