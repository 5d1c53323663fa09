"""The pages name files and sections that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import executor_client
import executor_client.smolagents

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY", "images/README")] + sorted(
    (ROOT / "docs").rglob("*.md")
)
# Directories that a page leaves out of the path of a file, as its section names the package.
ABOVE = [
    "",
    "client/executor_client",
    "docs",
    "executor_server",
    "executor_server/guest",
    "executor_server/backends",
    "examples",
]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def _prose(page: Path) -> str:
    return re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> set[str]:
    """Names that Markdown gives the headings: lower case, without punctuation, with hyphens for blanks."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_parts_that_are_made_from_code_and_tables_are_up_to_date() -> None:
    command = [sys.executable, "tools/page_parts.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pages
def test_links_lead_to_files_and_sections_that_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if not target.startswith(("http://", "https://")):
            name, _, anchor = target.partition("#")
            linked = (page.parent / name).resolve() if name else page
            assert linked.exists(), target
            assert not anchor or anchor in _anchors(linked), target


@pages
def test_source_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`([\w./-]+\.(?:py|proto|sh))`", _prose(page)):
        places = [ROOT / above / name for above in ABOVE]
        in_a_backend = (ROOT / "executor_server/backends").glob(f"*/{name}") if "/" not in name else iter(())
        assert any(place.exists() for place in places) or any(in_a_backend), name


def test_every_package_of_the_daemon_and_the_guest_is_in_the_architecture() -> None:
    tables = re.findall(r"^\| (`.*?`) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    named = {name for row in tables for name in re.findall(r"`(\w+)`", row)}
    for parent in (ROOT / "executor_server", ROOT / "executor_server/guest"):
        packages = {package.parent.name for package in parent.glob("*/__init__.py")}
        assert packages - named - {"guest"} == set()


def test_each_public_name_of_the_client_is_in_its_reference_once() -> None:
    named = re.findall(r"^::: (.*)$", (ROOT / "docs/api.md").read_text(), re.MULTILINE)
    public = [
        f"{module.__name__}.{name}"
        for module in (executor_client, executor_client.smolagents)
        for name in module.__all__
    ]
    assert sorted(named) == sorted(public)
