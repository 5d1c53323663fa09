"""Encodes and decodes dates, times and time zones of the standard library.

A zone is sent by its key and looked up in the receiver's own database. Each moment carries its offset too, so that a
receiver without the zone, or a zone without a key, still gives the right moment, at a fixed offset.
"""

from __future__ import annotations

from executor_api.values.generic import EnumValue, OpaqueValue, Record
from executor_api.values.kinds import Kind, NoneType, matches
from executor_api.values.limits import DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from datetime import date, datetime, time, timedelta, timezone
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

# The characters of the database's own names. Without a dot, no key climbs out of the folder it is looked up in.
_ZONE_KEY = r"[A-Za-z0-9_+-]{1,32}(/[A-Za-z0-9_+-]{1,32}){0,3}"
_DATE = r"\d{4}-\d\d-\d\d"
_TIME = r"\d\d:\d\d:\d\d(\.\d{6})?"
MAX_TEXT_CHARS = 200
_DATETIME = rf"{_DATE}T{_TIME}"

# ---------------------------------------------------------------------------------------------------------------------
# Zones


def _lower_timezone(value: Any, writer: Writer) -> Lowered:
    offset, *name = value.__getinitargs__()
    return ["timezone", offset.days * 86_400 + offset.seconds, offset.microseconds], tuple(name) or (None,), False


def _make_timezone(reader: Reader, children: list[Any], seconds: int, microseconds: int) -> timezone:
    from datetime import timedelta, timezone

    offset = timedelta(seconds=seconds, microseconds=microseconds)
    return timezone(offset) if children[0] is None else timezone(offset, children[0])


def lower_zone(value: Any, writer: Writer) -> Lowered | None:
    """Lowers a zone by its key (`key` in zoneinfo, `zone` in pytz) or by its fixed offset; None for any other."""
    key = getattr(value, "key", None) or getattr(value, "zone", None)
    if type(key) is str and matches(_ZONE_KEY, key):
        return ["zone", key], (), False
    offset = value.utcoffset(None)
    if offset is None:
        return None
    return ["timezone", offset.days * 86_400 + offset.seconds, offset.microseconds], (None,), False


def _make_zone(reader: Reader, children: list[Any], key: str) -> object:
    from zoneinfo import ZoneInfo

    if not matches(_ZONE_KEY, key):
        raise DecodeError("a zone node does not hold the key of a time zone")
    try:
        return ZoneInfo(key)
    except (KeyError, OSError, ValueError):  # not in this machine's database, or the name of a folder of it
        return OpaqueValue("zoneinfo.ZoneInfo", key)


# ---------------------------------------------------------------------------------------------------------------------
# Moments


def _lower_date(value: date, writer: Writer) -> Lowered:
    return ["date", value.isoformat()], (), False


def _make_date(reader: Reader, children: list[Any], text: str) -> date:
    from datetime import date

    return date.fromisoformat(_matching(_DATE, text))


def _lower_datetime(value: datetime, writer: Writer) -> Lowered:
    return _lower_moment("datetime", value)


def _make_datetime(reader: Reader, children: list[Any], text: str, fold: int) -> datetime:
    from datetime import datetime

    return datetime.fromisoformat(_matching(_DATETIME, text)).replace(fold=fold)


def _make_zoned_datetime(reader: Reader, children: list[Any], text: str, fold: int, offset_s: float | None) -> object:
    return _with_zone(_make_datetime(reader, [], text, fold), children[0], offset_s)


def _lower_time(value: time, writer: Writer) -> Lowered:
    return _lower_moment("time", value)


def _make_time(reader: Reader, children: list[Any], text: str, fold: int) -> time:
    from datetime import time

    return time.fromisoformat(_matching(_TIME, text)).replace(fold=fold)


def _make_zoned_time(reader: Reader, children: list[Any], text: str, fold: int, offset_s: float | None) -> object:
    return _with_zone(_make_time(reader, [], text, fold), children[0], offset_s)


def _lower_moment(tag: str, value: Any) -> Lowered:
    text = value.replace(tzinfo=None).isoformat()
    if value.tzinfo is None:
        return [tag, text, value.fold], (), False
    offset = value.utcoffset()
    offset_s = None if offset is None else offset.total_seconds()
    return [f"{tag}-zone", text, value.fold, offset_s], (value.tzinfo,), False


def _with_zone(value: datetime | time, zone: object, offset_s: float | None) -> object:
    from datetime import timedelta, timezone, tzinfo

    if isinstance(zone, tzinfo):
        return value.replace(tzinfo=zone)
    if not isinstance(zone, (OpaqueValue, Record, EnumValue)):
        raise DecodeError("what should be a time zone is something else")
    if offset_s is None:
        return OpaqueValue(f"datetime.{type(value).__name__}", f"{value.isoformat()} ({zone})"[:MAX_TEXT_CHARS])
    offset = timedelta(seconds=offset_s)
    has_key = isinstance(zone, OpaqueValue) and zone.type_name == "zoneinfo.ZoneInfo"
    return value.replace(tzinfo=timezone(offset, str(zone)) if has_key else timezone(offset))


def _lower_timedelta(value: timedelta, writer: Writer) -> Lowered:
    return ["timedelta", value.days, value.seconds, value.microseconds], (), False


def _make_timedelta(reader: Reader, children: list[Any], days: int, seconds: int, microseconds: int) -> timedelta:
    from datetime import timedelta

    return timedelta(days, seconds, microseconds)


def _matching(pattern: str, text: str) -> str:
    if not matches(pattern, text):
        raise DecodeError("a date or a time is malformed")
    return text


LOWER_BY_NAME = {
    ("datetime", "date"): _lower_date,
    ("datetime", "datetime"): _lower_datetime,
    ("datetime", "time"): _lower_time,
    ("datetime", "timedelta"): _lower_timedelta,
    ("datetime", "timezone"): _lower_timezone,
    ("zoneinfo", "ZoneInfo"): lower_zone,
}
_OFFSET_S = (int, float, NoneType)
KINDS = {
    "date": Kind(_make_date, header=(str,)),
    "datetime": Kind(_make_datetime, header=(str, int)),
    "datetime-zone": Kind(_make_zoned_datetime, header=(str, int, _OFFSET_S), children=1),
    "time": Kind(_make_time, header=(str, int)),
    "time-zone": Kind(_make_zoned_time, header=(str, int, _OFFSET_S), children=1),
    "timedelta": Kind(_make_timedelta, header=(int, int, int)),
    "timezone": Kind(_make_timezone, header=(int, int), children=1),
    "zone": Kind(_make_zone, header=(str,)),
}
