"""The example of docs/policy.md works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from executor_server.daemon.cli import main

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs/policy.md").read_text()


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the example of the page to policy.toml in the current directory."""
    (found,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("policy.toml").write_text(found)
    return Path("policy.toml")


def test_the_example_can_be_used(example: Path) -> None:
    result = CliRunner().invoke(main, ["policy", "check", str(example)])
    assert result.exit_code == 0, result.output


def test_the_explanation_is_what_is_printed(example: Path) -> None:
    (command,) = re.findall(r"    executor-server policy explain FILE (.*)\n", TEXT)
    arguments = re.fullmatch(r"--tenant (\w+) --request '(.*)'", command)
    assert arguments is not None
    result = CliRunner().invoke(
        main, ["policy", "explain", str(example), "--tenant", arguments[1], "--request", arguments[2]]
    )
    assert result.exit_code == 1
    assert "\n".join(f"    {line}" for line in result.output.splitlines()) in TEXT
