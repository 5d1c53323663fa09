"""Writes two parts of docs/backends.md: the contract's table of promises, and the tools of local sandboxes.

    python tools/backends_docs.py [--check]

`--check` writes nothing, and fails when the page differs. tests/contract/test_promises.py checks that each promise has
its tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from pages import between_marks, write_or_check

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from executor_server.backends.local.system import GUARANTEED_TOOLS, OTHER_TOOLS  # noqa: E402
from tests.contract.promises import BACKENDS, PROMISES, TOPICS, Keeping, Promise  # noqa: E402 - found by the line above

TARGET = ROOT / "docs/backends.md"
BEGIN, END = "<!-- promises: made by tools/backends_docs.py -->\n", "<!-- end of promises -->\n"
BEGIN_TOOLS, END_TOOLS = "<!-- tools: made by tools/backends_docs.py -->\n", "<!-- end of tools -->\n"
HEADS = {"local": "local", "docker": "Docker", "e2b": "E2B"}
WORDS = {Keeping.KEPT: "yes", Keeping.BY_SUPERVISOR: "supervisor", Keeping.NOT_KEPT: "no"}
ELSEWHERE = "°"


def _lines() -> Iterator[str]:
    notes: dict[str, int] = {}
    yield f"| | {' | '.join(HEADS[backend] for backend in BACKENDS)} |"
    yield "|---" * (len(BACKENDS) + 1) + "|"
    for topic in TOPICS:
        yield f"| **{topic}** |" + " |" * len(BACKENDS)
        for promise in PROMISES:
            if promise.topic == topic:
                cells = " | ".join(_cell(promise, backend, notes) for backend in BACKENDS)
                yield f"| {promise.sentence.replace('|', chr(92) + '|')} | {cells} |"
    yield ""
    yield f"{ELSEWHERE} The guest's doing, which is the same in every sandbox: tested on the backends without the sign."
    yield ""
    for why, number in notes.items():
        yield f"{number}. {why}"


def _cell(promise: Promise, backend: str, notes: dict[str, int]) -> str:
    word = WORDS[promise.keeping(backend)]
    otherwise = promise.otherwise.get(backend)
    if otherwise is not None:
        word += f" ({notes.setdefault(otherwise.why, len(notes) + 1)})"
    elif backend not in promise.proved_on:
        word += ELSEWHERE
    return word


def main() -> None:
    tools = [
        "| | |",
        "|---|---|",
        f"| always | `{' '.join(sorted(GUARANTEED_TOOLS))}` |",
        f"| where the host has them | `{' '.join(sorted(OTHER_TOOLS))}`, and the system's own Python |",
    ]
    write_or_check(TARGET, between_marks(TARGET, BEGIN_TOOLS, END_TOOLS, tools))
    write_or_check(TARGET, between_marks(TARGET, BEGIN, END, _lines()))


if __name__ == "__main__":
    main()
