"""Writes the table of E2B's clients in docs/e2b-protocol.md, from the list that `nox -s facades` runs.

    python tools/facades_docs.py [--check]

`--check` writes nothing, and fails when the table is not what would be written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from pages import between_marks, write_or_check

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests/facades/clients.toml"
TARGET = ROOT / "docs/e2b-protocol.md"
BEGIN, END = "<!-- clients: made by tools/facades_docs.py -->\n", "<!-- end of clients -->\n"
FORMS = {"domain": "domain", "urls": "addresses"}


def _lines() -> Iterator[str]:
    yield "| client | versions | set up with | its program covers |"
    yield "|---|---|---|---|"
    for client in tomllib.loads(SOURCE.read_text())["client"]:
        versions = ", ".join(f"`{package}`" for package in client["packages"])
        forms = " or ".join(FORMS[form] for form in client["forms"])
        yield f"| {client['name']} | {versions} | {forms} | {client['shows']} |"


if __name__ == "__main__":
    write_or_check(TARGET, between_marks(TARGET, BEGIN, END, _lines()))
