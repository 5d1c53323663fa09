"""Writes the table of frameworks in docs/integrations.md, from what the tests of tests/frameworks hold each to.

    python tools/integrations_docs.py [--check]

`--check` writes nothing, and fails when the table is not what would be written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from pages import between_marks, write_or_check

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "tests/frameworks/integrations.toml"
TARGET = ROOT / "docs/integrations.md"
BEGIN, END = "<!-- frameworks: made by tools/integrations_docs.py -->\n", "<!-- end of frameworks -->\n"


def _lines() -> Iterator[str]:
    entries = tomllib.loads(SOURCE.read_text())["integration"]
    yield "| framework | version | its suite | passed |"
    yield "|---|---|---|---|"
    for entry in entries:
        suite, failing = entry.get("suite"), len(entry.get("exceptions", ()))
        name = f"`{suite['module']}`" if suite else f"none; {entry.get('tried', 'scripted agents')}"
        passed = f"{suite['tests'] - failing} of {suite['tests']}" if suite else ""
        page = f"[{entry['framework']}](integrations/{entry['extra']}.md)"
        yield f"| {page} | `{entry['package']}` {entry['version']} | {name} | {passed} |"
    for entry in entries:
        if exceptions := entry.get("exceptions"):
            yield ""
            yield f"Not passed with {entry['package']} {entry['version']}:"
            yield ""
            for each in exceptions:
                yield f"- `{each['test']}`: {each['reason']}"


if __name__ == "__main__":
    write_or_check(TARGET, between_marks(TARGET, BEGIN, END, _lines()))
