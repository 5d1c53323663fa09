"""The table of docs/smolagents.md says what each executor does: every feature is tried on each of them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from tests.features import probes
from tests.features.observe import PROBES
from tests.features.places import COLUMNS, Place

FILE = Path(__file__).with_name("expected.toml")
TABLE = tomllib.loads(FILE.read_text())
FEATURES = {feature["name"]: feature for group in TABLE["group"] for feature in group["feature"]}

assert probes.__all__  # importing them has filled PROBES


@pytest.mark.parametrize("name", FEATURES)
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
