"""Filters of the templates: sizes, durations, times and outcomes, as people read them."""

from __future__ import annotations

from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from executor_api.v1 import types_pb2 as pb
from executor_client.replays.timeline import enum_text

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def size(size_bytes: float) -> str:
    """ "1.5 MiB"."""
    number, unit = size_bytes, 0
    while number >= 1024 and unit < len(_UNITS) - 1:
        number, unit = number / 1024, unit + 1
    return f"{size_bytes:.0f} B" if unit == 0 else f"{number:.1f} {_UNITS[unit]}"


def number(value: float) -> str:
    """ "12,345" or "0.25"."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def seconds(value_s: float) -> str:
    """ "35 ms", "4.2 s", "3 min 20 s", "2 h 5 min" or "3 d 4 h"."""
    if value_s < 1:
        return f"{max(0.0, value_s) * 1000:.0f} ms"
    if value_s < 60:
        return f"{value_s:.1f} s"
    whole = int(value_s)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s} {part}"
    raise AssertionError(value_s)


def when(moment: Timestamp | float) -> str:
    """A time, "2026-01-31 12:00:00" in UTC; of seconds since the epoch, too."""
    return _datetime(moment).strftime("%Y-%m-%d %H:%M:%S")


def iso(moment: Timestamp | float) -> str:
    """The same for the attribute `datetime`."""
    return _datetime(moment).strftime("%Y-%m-%dT%H:%M:%SZ")


def outcome(value: int) -> str:
    """ "out of memory" for `pb.Outcome`; empty if there is none."""
    return enum_text(pb.Outcome, value, "OUTCOME_") if value else ""


def _datetime(moment: Timestamp | float) -> datetime:
    seconds_ = moment.seconds + moment.nanos / 1e9 if isinstance(moment, Timestamp) else moment
    return datetime.fromtimestamp(seconds_, UTC)


FILTERS = {each.__name__: each for each in (size, number, seconds, when, iso, outcome)}
