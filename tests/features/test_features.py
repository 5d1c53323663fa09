"""The table of docs/smolagents.md says what each executor does: every feature is tried on each of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.features import probes
from tests.features.observe import PROBES
from tests.features.places import COLUMNS, Place
from tests.support.rounds import usual

FILE = Path(__file__).with_name("expected.toml")
TABLE = tomllib.loads(FILE.read_text())
FEATURES = {feature["name"]: feature for group in TABLE["group"] for feature in group["feature"]}

assert probes.__all__  # importing them has filled PROBES


# What a feature meets of a backend; the rest is the same on each of ours.
OF_THE_BACKEND = ("tool_by_decorator", "isolated", "file_given", "memory_limit", "crash", "interruption")
CASES = [(place, name) for place in COLUMNS for name in FEATURES]
LONG = {
    (place, name)
    for place, name in CASES
    if place == "docker" or (place in ("ours_docker", "ours_e2b") and name not in OF_THE_BACKEND)
}


@pytest.mark.parametrize(("place", "name"), usual(CASES, but=LONG), indirect=["place"], scope="session")
def test_the_feature_is_as_the_table_says(place: Place, name: str) -> None:
    expected = FEATURES[name][place.name]
    for _ in range(place.attempts):
        with place.quiet():
            seen = PROBES[name](place)
        if seen == expected:
            break
    assert seen == expected, f"{name} on {place.name}: {FILE.name} says {expected!r}, seen was {seen!r}"


def test_the_table_has_each_probe_once() -> None:
    assert sorted(PROBES) == sorted(feature["name"] for group in TABLE["group"] for feature in group["feature"])


def test_each_verdict_is_a_yes_or_says_how_it_is_not() -> None:
    for name, feature in FEATURES.items():
        for column in COLUMNS:
            kind, _, how = feature[column].partition(": ")
            assert (kind == "yes" and not how) or kind == "no" or (kind == "differs" and how), (name, column)
