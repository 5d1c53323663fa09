"""Writes the parts of docs/ that are made from the code and from the tests' tables.

    python tools/page_parts.py [--check]

`--check` writes nothing, and fails when a page is not what would be written. A part stands between two marks of its
page: `<!-- NAME: made by tools/page_parts.py -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import settings_tables
from pages import between_marks, write_or_check

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from executor_server.backends.local.system import GUARANTEED_TOOLS, OTHER_TOOLS  # noqa: E402
from executor_server.core.config.config import Config  # noqa: E402
from executor_server.policy.file import PolicyFile  # noqa: E402
from executor_server.telemetry.metrics import Metrics  # noqa: E402
from executor_server.telemetry.sources import DESCRIBED  # noqa: E402
from tests.contract.promises import BACKENDS, PROMISES, TOPICS, Keeping, Promise  # noqa: E402

EXECUTORS = {
    "local": "local executor",
    "docker": "`DockerExecutor`",
    "ours_local": "ours, local",
    "ours_docker": "ours, Docker",
    "ours_e2b": "ours, E2B",
}
FORMS = {"domain": "domain", "urls": "addresses"}
BACKEND_NAMES = {"local": "local", "docker": "Docker", "e2b": "E2B"}
WORDS = {Keeping.KEPT: "yes", Keeping.BY_SUPERVISOR: "supervisor", Keeping.NOT_KEPT: "no"}
ELSEWHERE = "°"


def features() -> Iterator[str]:
    """The results that tests/features expects of each executor."""
    yield f"| | {' | '.join(EXECUTORS.values())} |"
    yield "|---" * (len(EXECUTORS) + 1) + "|"
    for group in _table("tests/features/expected.toml")["group"]:
        yield f"| **{group['title']}** |" + " |" * len(EXECUTORS)
        for feature in group["feature"]:
            cells = [feature[column] for column in EXECUTORS]
            yield f"| {feature['title']} | {' | '.join(cells)} |"


def frameworks() -> Iterator[str]:
    """The results that tests/frameworks expects with each framework."""
    entries = _table("tests/frameworks/integrations.toml")["integration"]
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


def clients() -> Iterator[str]:
    """The clients of E2B that `nox -s facades` runs."""
    yield "| client | versions | set up with | its program covers |"
    yield "|---|---|---|---|"
    for client in _table("tests/facades/clients.toml")["client"]:
        versions = ", ".join(f"`{package}`" for package in client["packages"])
        forms = " or ".join(FORMS[form] for form in client["forms"])
        yield f"| {client['name']} | {versions} | {forms} | {client['shows']} |"


def metrics() -> Iterator[str]:
    yield "| Metric | Kind | Labels | Meaning |"
    yield "|---|---|---|---|"
    described = Metrics(version="", backend="", methods=()).described
    for entry in sorted((*described, *DESCRIBED), key=lambda entry: entry.name):
        labels = ", ".join(f"`{label}`" for label in entry.labels)
        yield f"| `{entry.name}` | {entry.kind} | {labels} | {entry.meaning} |"


def tools() -> Iterator[str]:
    """The programs in local sandboxes."""
    yield "| | |"
    yield "|---|---|"
    yield f"| always | `{' '.join(sorted(GUARANTEED_TOOLS))}` |"
    yield f"| where the host has them | `{' '.join(sorted(OTHER_TOOLS))}`, and the system's own Python |"


def promises() -> Iterator[str]:
    """The contract of backends; tests/contract/test_promises.py checks that each promise has its tests."""
    notes: dict[str, int] = {}
    yield f"| | {' | '.join(BACKEND_NAMES[backend] for backend in BACKENDS)} |"
    yield "|---" * (len(BACKENDS) + 1) + "|"
    for topic in TOPICS:
        yield f"| **{topic}** |" + " |" * len(BACKENDS)
        for promise in PROMISES:
            if promise.topic == topic:
                cells = " | ".join(_keeping(promise, backend, notes) for backend in BACKENDS)
                yield f"| {promise.sentence.replace('|', chr(92) + '|')} | {cells} |"
    yield ""
    yield f"{ELSEWHERE} The guest's doing, which is the same in every sandbox: tested on the backends without the sign."
    yield ""
    for why, number in notes.items():
        yield f"{number}. {why}"


def _keeping(promise: Promise, backend: str, notes: dict[str, int]) -> str:
    word = WORDS[promise.keeping(backend)]
    otherwise = promise.otherwise.get(backend)
    if otherwise is not None:
        word += f" ({notes.setdefault(otherwise.why, len(notes) + 1)})"
    elif backend not in promise.proved_on:
        word += ELSEWHERE
    return word


def policy_keys() -> Iterator[str]:
    return settings_tables.lines(PolicyFile)


def configuration_keys() -> Iterator[str]:
    return settings_tables.lines(Config)


PARTS: tuple[tuple[str, Callable[[], Iterable[str]]], ...] = (
    ("smolagents", features),
    ("integrations", frameworks),
    ("e2b-protocol", clients),
    ("operations", metrics),
    ("backends", tools),
    ("backends", promises),
    ("policy", policy_keys),
    ("configuration", configuration_keys),
)
"""The pages of docs/, and the function that makes the part between the marks with its name."""


def _table(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text())


if __name__ == "__main__":
    for page, part in PARTS:
        name = part.__name__.replace("_", " ")
        begin, end = f"<!-- {name}: made by tools/page_parts.py -->\n", f"<!-- end of {name} -->\n"
        target = ROOT / f"docs/{page}.md"
        write_or_check(target, between_marks(target, begin, end, part()))
