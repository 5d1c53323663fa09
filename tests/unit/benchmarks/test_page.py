"""A run writes its own table of docs/performance.md and nothing beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import __main__ as bench
from benchmarks.compare import __main__ as compare
from benchmarks.page import PAGE, NoPlace, begin_mark, end_mark, write_section
from benchmarks.peers import __main__ as peers


def test_a_section_is_replaced_and_the_rest_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{begin_mark('bench')}\nold\n\n{end_mark('bench')}after\n")
    for _ in range(2):
        write_section("bench", "new\n", page)
    assert page.read_text() == f"before\n{begin_mark('bench')}\nnew\n\n{end_mark('bench')}after\n"


def test_a_page_without_marks_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing of the kind\n")
    with pytest.raises(NoPlace, match=r"page\.md lacks"):
        write_section("bench", "new", page)
    assert page.read_text() == "nothing of the kind\n"


@pytest.mark.parametrize("section", ["bench", "bench-compare", "bench-peers"])
def test_the_page_has_a_place_for_each_table(section: str) -> None:
    text = PAGE.read_text()
    assert text.count(begin_mark(section)) == text.count(end_mark(section)) == 1
    assert text.index(begin_mark(section)) < text.index(end_mark(section))


@pytest.mark.parametrize(
    ("command", "arguments"),
    [(bench.main, ["--only", "execute"]), (compare.main, ["--quick"]), (peers.main, ["--only", "add"])],
)
def test_a_part_is_not_written_over_the_whole(command: object, arguments: list[str]) -> None:
    result = CliRunner().invoke(command, [*arguments, "--write"])  # type: ignore[arg-type]
    assert result.exit_code == 2
    assert "--write is for the whole table" in result.output
