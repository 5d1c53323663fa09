"""Reports of a proxy that may have been taken over: checked field by field, cut, and printable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_server.guest.egress import reasons
from executor_server.network.egress import reports
from executor_server.network.egress.reports import BadReport, connection_of, denial_of

CONNECTION: dict[str, Any] = {
    "connection_id": "ab-1",
    "host": "x.example",
    "port": 443,
    "address": "192.0.2.1",
    "rule": "*.example",
    "sent_bytes": 1,
    "received_bytes": 2,
    "duration_s": 0.5,
    "reason": reasons.ENDED,
    "secret_used": "",
}
DENIAL = {"host": "x.example", "port": 443, "reason": reasons.NOT_ALLOWED, "message": "no", "address": ""}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def test_connection_is_read_as_it_was_written() -> None:
    found = connection_of(CONNECTION, ended=True)
    assert {name: getattr(found, name) for name in CONNECTION} == CONNECTION


def test_connection_that_lasts_has_no_reason() -> None:
    assert connection_of({**CONNECTION, "reason": "whatever"}, ended=False).reason == ""


@pytest.mark.parametrize(
    "change",
    [
        {"port": 65536},
        {"port": -1},
        {"port": True},
        {"port": "443"},
        {"port": 443.0},
        {"sent_bytes": -1},
        {"sent_bytes": 2**53 + 1},
        {"received_bytes": None},
        {"duration_s": float("inf")},
        {"duration_s": float("nan")},
        {"duration_s": -1},
        {"duration_s": 10**400},  # an int too large for a float
        {"duration_s": "1"},
        {"host": None},
        {"host": ["x"]},
        {"rule": 3},
        {"connection_id": {}},
        {"reason": "made up"},
        {"secret_used": 1},
    ],
    ids=repr,
)
def test_connection_with_a_wrong_field_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(BadReport):
        connection_of({**CONNECTION, **change}, ended=True)


@pytest.mark.parametrize("values", [None, [], "x", 3, {}], ids=repr)
def test_record_that_is_none_is_refused(values: object) -> None:
    with pytest.raises(BadReport):
        connection_of(values, ended=True)
    with pytest.raises(BadReport):
        denial_of(values)


def test_missing_field_is_refused() -> None:
    for name in DENIAL:
        with pytest.raises(BadReport):
            denial_of({key: value for key, value in DENIAL.items() if key != name})


def test_reason_outside_the_closed_list_is_refused() -> None:
    """Reasons are labels of metrics: a proxy that made them up could fill the daemon's memory."""
    with pytest.raises(BadReport):
        denial_of({**DENIAL, "reason": "x1"})


def test_text_is_cut_and_has_no_control_characters() -> None:
    found = denial_of({**DENIAL, "host": "a\r\n\x1b[31m\u2028b" + "c" * 1000, "message": "\0" * 5000})
    assert found.host.startswith("a???[31m?bc")
    assert len(found.host) == 256
    assert set(found.message) == {"?"}
    assert len(found.message) == 700


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(CONNECTION)), JSON))
def test_whatever_is_read_is_bounded_and_printable(change: dict[str, Any]) -> None:
    try:
        found = connection_of({**CONNECTION, **change}, ended=True)
    except BadReport as error:
        assert str(error).isprintable()
        return
    for value in (getattr(found, name) for name in CONNECTION):
        if isinstance(value, str):
            assert value.isprintable()
            assert len(value) <= 300
        else:
            assert 0 <= value <= 2**53


def test_every_message_of_an_error_is_its_own() -> None:
    """No text of the proxy is in a sentence that the daemon logs."""
    for values in ({**CONNECTION, "host": 3}, {**CONNECTION, "reason": "SECRET"}, {**CONNECTION, "port": "SECRET"}):
        with pytest.raises(BadReport) as caught:
            reports.connection_of(values, ended=True)
        assert "SECRET" not in str(caught.value)
