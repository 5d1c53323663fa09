"""The pictures of docs/pictures are what their sources give, and are whole."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))


def test_the_pictures_are_what_the_generator_draws() -> None:
    command = [sys.executable, "tools/pictures.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_a_picture_is_an_image_with_a_title_and_nothing_from_elsewhere(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.findtext("{http://www.w3.org/2000/svg}title")
    assert not re.search(r"<(script|image|use|foreignObject)|href", picture.read_text())


def test_pages_show_pictures_that_are_there() -> None:
    shown = {
        (page.parent / name).resolve()
        for page in (ROOT / "docs").glob("*.md")
        for name in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert shown == {picture.resolve() for picture in PICTURES}
