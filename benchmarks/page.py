"""The tables of docs/performance.md that a run writes: each stands between two marks, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"


class NoPlace(Exception):
    """The page has no marks for the section."""


def begin_mark(section: str) -> str:
    return f"<!-- {section}: made by make {section} ARGS=--write -->\n"


def end_mark(section: str) -> str:
    return f"<!-- end of {section} -->\n"


def write_section(section: str, text: str, page: Path = PAGE) -> None:
    """Replaces what stands between the marks of a section. Raises NoPlace."""
    before, found_begin, rest = page.read_text().partition(begin_mark(section))
    _, found_end, after = rest.partition(end_mark(section))
    if not (found_begin and found_end):
        raise NoPlace(f"{page.name} lacks {begin_mark(section).strip()} or {end_mark(section).strip()}")
    page.write_text(f"{before}{found_begin}\n{text.strip()}\n\n{found_end}{after}")
