"""Encodes and decodes the scalars and the typed columns that pandas adds to numpy, below the level of a table.

The kinds are a closed list: masked integers, floats and booleans, strings, categories, moments with a zone, periods,
intervals. A column of any other kind (sparse, Arrow) is sent as the objects in it.
"""

from __future__ import annotations

import sys

from executor_api.values.generic import OpaqueValue
from executor_api.values.kinds import Kind, matches, without_library
from executor_api.values.limits import DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader

_MASKED = frozenset(
    ["Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64", "boolean"]
)
_CLOSED = ("left", "right", "both", "neither")
_UNITS = ("s", "ms", "us", "ns")
FREQUENCY = r"-?\d{0,9}[A-Za-z]{1,8}(-[A-Z0-9]{1,4}){0,2}"
_MAX_INT64 = 1 << 63

# ---------------------------------------------------------------------------------------------------------------------
# Lowering


def values_of(pd: Any, owner: Any) -> Any:
    """Returns the values of a column or an index in a form that can be lowered: a numpy array or one of pandas' own."""
    np: Any = sys.modules["numpy"]
    if isinstance(owner.dtype, np.dtype):
        return owner.to_numpy()
    if _is_carried(pd, owner.dtype):
        return owner.array
    return owner.to_numpy(dtype=object)


def _is_carried(pd: Any, dtype: Any) -> bool:
    own = (pd.StringDtype, pd.CategoricalDtype, pd.DatetimeTZDtype, pd.PeriodDtype, pd.IntervalDtype)
    return type(dtype) in own or dtype.name in _MASKED


def lower(pd: Any, value: Any) -> Lowered | None:
    """Lowers a scalar or an array of pandas."""
    kind = type(value)
    if value is pd.NA:
        return ["pd.na"], (), False
    if value is pd.NaT:
        return ["pd.nat"], (), False
    if kind is pd.Timestamp:
        return ["pd.timestamp", int(value.asm8.view("i8")), value.unit, _is_pytz(value.tzinfo)], (value.tzinfo,), False
    if kind is pd.Timedelta:
        return ["pd.timedelta", int(value.asm8.view("i8")), value.unit], (), False
    if kind is pd.Period:
        return ["pd.period", _period_frequency(pd.PeriodDtype(value.freq)), value.ordinal], (), False
    if kind is pd.Interval:
        return ["pd.interval", value.closed], (value.left, value.right), False
    if issubclass(kind, pd.api.extensions.ExtensionArray):
        return _lower_array(pd, value)
    return None


def _lower_array(pd: Any, value: Any) -> Lowered | None:
    np: Any = sys.modules["numpy"]
    dtype = value.dtype
    if type(dtype) is pd.CategoricalDtype:
        return ["pd.categories", bool(value.ordered)], (value.codes, value.categories), False
    if type(dtype) is pd.StringDtype:
        mask = value.isna()
        texts = np.where(mask, "", value.to_numpy(dtype=object)).tolist()
        missing = "NA" if getattr(dtype, "na_value", pd.NA) is pd.NA else "nan"
        return ["pd.strings", dtype.storage, missing], (texts, np.asarray(mask)), False
    if type(dtype) is pd.DatetimeTZDtype:
        return ["pd.moments", _is_pytz(value.tz)], (value.tz_convert(None).to_numpy(), value.tz), False
    if type(dtype) is pd.PeriodDtype:
        return ["pd.periods", _period_frequency(dtype)], (value.asi8,), False
    if type(dtype) is pd.IntervalDtype:
        return ["pd.intervals", value.closed], (values_of(pd, value.left), values_of(pd, value.right)), False
    if dtype.name in _MASKED:
        numbers = value.to_numpy(dtype=dtype.numpy_dtype, na_value=dtype.numpy_dtype.type(0))
        return ["pd.masked", dtype.name], (numbers, value.isna()), False
    return None


def _is_pytz(zone: object) -> bool:
    # Before version 3, pandas asked pytz for its zones, and for pandas the two make different dtypes.
    return type(zone).__module__.partition(".")[0] == "pytz"


def _period_frequency(dtype: Any) -> str:
    name: str = dtype.name  # "period[M]": the name that PeriodDtype takes, in every version
    return name[len("period[") : -1]


# ---------------------------------------------------------------------------------------------------------------------
# Making


def import_pandas() -> Any:
    """Returns pandas, or None where it is not installed."""
    try:
        import pandas
    except ImportError:
        return None
    return pandas


def _numpy() -> Any:
    return sys.modules["numpy"]  # pandas has imported it


def with_pandas(type_name: str, build: Callable[..., object], name_at: int | None = None) -> Callable[..., object]:
    """Builds a value with pandas; returns an OpaqueValue when pandas is absent or refuses, or a part is one.

    The child at `name_at` is a name, which may be an OpaqueValue like any other object.

    `build` raises DecodeError for a malformed node. If pandas refuses a node after that, its version lacks something,
    and one part that can't be built is no reason to lose the rest of the value.
    """

    def make(reader: Reader, children: list[Any], *header: Any) -> object:
        pd = import_pandas()
        if pd is None:
            return without_library(reader, "pandas", type_name, "pandas is not installed here")
        if any(type(child) is OpaqueValue for position, child in enumerate(children) if position != name_at):
            return OpaqueValue(type_name, "a part of it cannot be had here")
        try:
            return build(pd, children, *header)
        except DecodeError:
            raise
        except Exception as error:  # noqa: BLE001 - pandas refuses with whatever its depths raise
            return OpaqueValue(type_name, f"cannot be built here: {type(error).__name__}: {error}"[:500])

    return make


def is_array(value: Any, kinds: str) -> bool:
    """True for a numpy array of one dimension with a dtype of one of the kinds."""
    np = _numpy()
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in kinds


def is_values(pd: Any, value: Any) -> bool:
    """True for a value that `values_of` can return."""
    return type(value) is _numpy().ndarray or isinstance(value, pd.api.extensions.ExtensionArray)


def require(condition: bool, what: str) -> None:
    if not condition:
        raise DecodeError(f"{what} is malformed")


def _make_timestamp(pd: Any, children: list[Any], number: int, unit: str, is_pytz: bool) -> object:
    require(unit in _UNITS and abs(number) < _MAX_INT64, "a timestamp")
    moment = pd.Timestamp(_numpy().datetime64(number, unit))
    if children[0] is None:
        return moment
    moment = moment.tz_localize("UTC").tz_convert(_zone(children[0], is_pytz))
    repr(moment)  # raises outside of Python's own years: there pandas makes moments in a zone, but can't show them
    return moment


def _make_timedelta(pd: Any, children: list[Any], number: int, unit: str) -> object:
    require(unit in _UNITS and abs(number) < _MAX_INT64, "a timedelta")
    return pd.Timedelta(_numpy().timedelta64(number, unit))


def _make_period(pd: Any, children: list[Any], frequency: str, ordinal: int) -> object:
    require(matches(FREQUENCY, frequency) and abs(ordinal) < _MAX_INT64, "a period")
    return pd.Period(ordinal=ordinal, freq=frequency)


def _make_interval(pd: Any, children: list[Any], closed: str) -> object:
    require(closed in _CLOSED, "an interval")
    return pd.Interval(children[0], children[1], closed)


def _make_categories(pd: Any, children: list[Any], ordered: bool) -> object:
    codes, categories = children
    require(is_array(codes, "i") and isinstance(categories, pd.Index), "a column of categories")
    if len(codes):
        require(codes.min() >= -1 and codes.max() < len(categories), "a column of categories")
    return pd.Categorical.from_codes(codes, categories=categories, ordered=ordered)


def _make_strings(pd: Any, children: list[Any], storage: str, missing: str) -> object:
    texts, mask = children
    require(storage in ("python", "pyarrow", "pyarrow_numpy") and missing in ("NA", "nan"), "a column of strings")
    require(type(texts) is list and set(map(type, texts)) <= {str}, "a column of strings")
    require(is_array(mask, "b") and len(mask) == len(texts), "a column of strings")
    np = _numpy()
    values = np.array([*texts, None], dtype=object)[:-1]
    values[mask] = None
    storage = "pyarrow" if storage.startswith("pyarrow") and _has_arrow() else "python"
    if missing == "NA":
        return pd.array(values, dtype=pd.StringDtype(storage))
    try:
        dtype = pd.StringDtype(storage, na_value=np.nan)
    except TypeError:  # before version 2.3, pandas kept such text as objects
        values[mask] = np.nan
        return values
    return pd.array(values, dtype=dtype)


def _has_arrow() -> bool:
    try:
        import pyarrow  # noqa: F401 - pandas checks it in the same way
    except ImportError:
        return False
    return True


def _make_moments(pd: Any, children: list[Any], is_pytz: bool) -> object:
    moments, zone = children
    require(is_array(moments, "M"), "a column of moments")
    index = pd.DatetimeIndex(moments).tz_localize("UTC").tz_convert(_zone(zone, is_pytz))
    if len(index):
        repr((index.min(), index.max()))  # as with a single moment; those between them can be shown if these can
    return index.array


def _zone(value: Any, is_pytz: bool) -> object:
    from datetime import tzinfo

    require(isinstance(value, tzinfo), "a time zone")
    if is_pytz and hasattr(value, "key"):
        try:
            from pytz import timezone  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            return value
        return timezone(value.key)
    return value


def _make_periods(pd: Any, children: list[Any], frequency: str) -> object:
    require(matches(FREQUENCY, frequency) and is_array(children[0], "i"), "a column of periods")
    return pd.arrays.PeriodArray(children[0], dtype=pd.PeriodDtype(frequency))


def _make_intervals(pd: Any, children: list[Any], closed: str) -> object:
    left, right = children
    require(is_values(pd, left) and is_values(pd, right) and closed in _CLOSED, "a column of intervals")
    require(left.ndim == 1 and left.shape == right.shape, "a column of intervals")
    return pd.arrays.IntervalArray.from_arrays(left, right, closed=closed)


def _make_masked(pd: Any, children: list[Any], name: str) -> object:
    numbers, mask = children
    require(name in _MASKED and is_array(numbers, "iufb") and is_array(mask, "b"), "a column of numbers")
    require(
        len(numbers) == len(mask) and numbers.dtype.name.lower().startswith(name.lower()[:4]), "a column of numbers"
    )
    kind = {"b": "BooleanArray", "f": "FloatingArray"}.get(numbers.dtype.kind, "IntegerArray")
    return getattr(pd.arrays, kind)(numbers, mask)


KINDS = {
    "pd.na": Kind(with_pandas("pandas.NA", lambda pd, children: pd.NA)),
    "pd.nat": Kind(with_pandas("pandas.NaT", lambda pd, children: pd.NaT)),
    "pd.timestamp": Kind(with_pandas("pandas.Timestamp", _make_timestamp), header=(int, str, bool), children=1),
    "pd.timedelta": Kind(with_pandas("pandas.Timedelta", _make_timedelta), header=(int, str)),
    "pd.period": Kind(with_pandas("pandas.Period", _make_period), header=(str, int)),
    "pd.interval": Kind(with_pandas("pandas.Interval", _make_interval), header=(str,), children=2),
    "pd.categories": Kind(with_pandas("pandas.array", _make_categories), header=(bool,), children=2),
    "pd.strings": Kind(with_pandas("pandas.array", _make_strings), header=(str, str), children=2),
    "pd.moments": Kind(with_pandas("pandas.array", _make_moments), header=(bool,), children=2),
    "pd.periods": Kind(with_pandas("pandas.array", _make_periods), header=(str,), children=1),
    "pd.intervals": Kind(with_pandas("pandas.array", _make_intervals), header=(str,), children=2),
    "pd.masked": Kind(with_pandas("pandas.array", _make_masked), header=(str,), children=2),
}
