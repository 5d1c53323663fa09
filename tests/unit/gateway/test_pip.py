"""Lines that install packages, in sandboxes without a network."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from executor_server.gateway.e2b import pip


async def resolved(code: str) -> str:
    async def evaluate(_: str) -> dict[str, str]:
        return {"h2": "4.4.1"}

    return await pip.resolved(cast("Any", SimpleNamespace(info=SimpleNamespace(network=()), evaluate=evaluate)), code)


async def test_lines_are_answered_where_they_stand() -> None:
    rest = '"""\n!pip install h2\n"""\n%pip install -U\ny = 2'
    assert await resolved(f"x = 1\n  !pip install h2\n{rest}") == (
        f"x = 1\n  print('Requirement already satisfied: h2 (4.4.1)')\n{rest}"
    )


@pytest.mark.parametrize(
    "code",
    [
        "!pip install" + " h2" * (pip.WORDS_MAX + 1),
        "!pip install " + "h2" * pip.LINE_CHARS_MAX,
        "!pip install h2\n" + " " * pip.CODE_CHARS_MAX,
    ],
    ids=["words", "line", "code"],
)
async def test_what_is_too_long_runs_as_it_is(code: str) -> None:
    """Each word was parsed, and answered with 100 characters of code: 1 MiB of words took 15 s."""
    assert await resolved(code) == code


async def test_few_packages_are_answered_for_in_all_lines_together() -> None:
    lines = (await resolved("!pip install h2\n" * 10_000)).splitlines()
    assert sum(line.startswith("print(") for line in lines) == pip.WORDS_MAX
    assert set(lines[pip.WORDS_MAX :]) == {"!pip install h2"}
