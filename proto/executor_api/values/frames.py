"""Encodes and decodes tables of pandas: DataFrame, Series and every kind of index.

A table is sent column by column in the codec's own nodes, so dtypes, names and labels of any type arrive as they were.
A table whose columns all have one numpy dtype is sent as one array of two dimensions.
"""

from __future__ import annotations

import sys

from executor_api.values import columns
from executor_api.values.columns import FREQUENCY, is_values, require, values_of, with_pandas
from executor_api.values.kinds import ANY_NUMBER, Kind, NoneType, matches
from executor_api.values.limits import MAX_FRAME_COLUMNS, MAX_INDEX_LEVELS, OverLimit

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

# ---------------------------------------------------------------------------------------------------------------------
# Lowering


def lower(value: Any, writer: Writer, *, bases: bool = False) -> Lowered | None:
    """Lowers a value of pandas; with `bases`, also an instance of another author's subclass of DataFrame or Series."""
    pd: Any = sys.modules.get("pandas")
    if pd is None:
        return None
    kind = type(value)
    if kind is pd.DataFrame or (bases and issubclass(kind, pd.DataFrame)):
        return _lower_frame(pd, value, writer)
    if kind is pd.Series or (bases and issubclass(kind, pd.Series)):
        writer.expect_bytes(len(value) * _least_bytes(value.dtype))
        values = values_of(pd, value)
        _check_objects(values, writer)
        return ["pd.series"], (value.index, values, value.name, dict(value.attrs)), False
    if issubclass(kind, pd.Index):
        return _lower_index(pd, value, writer)
    return columns.lower(pd, value)


def _least_bytes(dtype: Any) -> int:
    """Returns the bytes that each value of a column takes at least, without reading any."""
    return dtype.itemsize if isinstance(dtype, sys.modules["numpy"].dtype) and not dtype.hasobject else 1


def _check_objects(values: Any, writer: Writer) -> None:
    """Raises OverLimit for a column that can't be sent by itself: without it, nothing of the table could be shown."""
    if len(values) > writer.limits.nodes and values.dtype == object and len(set(map(type, values))) > 1:
        raise OverLimit(f"a column of several types has at most {writer.limits.nodes:,} values, not {len(values):,}")


def _lower_frame(pd: Any, frame: Any, writer: Writer) -> Lowered:
    np: Any = sys.modules["numpy"]
    rows, count = frame.shape
    writer.expect_bytes(rows * sum(map(_least_bytes, frame.dtypes)))
    dtypes = set(frame.dtypes)
    (only,) = dtypes if len(dtypes) == 1 else (None,)
    labels = (frame.index, frame.columns, dict(frame.attrs))
    if isinstance(only, np.dtype) and not only.hasobject:
        return ["pd.block", rows, count], (*labels, frame.to_numpy()), False
    if count > MAX_FRAME_COLUMNS:
        raise OverLimit(f"a table of several types has at most {MAX_FRAME_COLUMNS:,} columns, and this one {count:,}")
    arrays = [values_of(pd, frame.iloc[:, position]) for position in range(count)]
    for values in arrays:
        _check_objects(values, writer)
    return ["pd.frame", rows, count], (*labels, *arrays), False


def _lower_index(pd: Any, index: Any, writer: Writer) -> Lowered | None:
    if type(index) is pd.RangeIndex:
        if not writer.take_labels(len(index)):
            return None
        return ["pd.rangeindex"], (index.start, index.stop, index.step, index.name), False
    if type(index) is pd.MultiIndex:
        names = list(index.names)
        if len(names) > MAX_INDEX_LEVELS:
            raise OverLimit(f"an index has at most {MAX_INDEX_LEVELS} levels, and this one {len(names):,}")
        return ["pd.multiindex", len(names)], (names, *index.levels, *index.codes), False
    frequency = getattr(index, "freqstr", None) if isinstance(index, (pd.DatetimeIndex, pd.TimedeltaIndex)) else None
    return ["pd.index", frequency], (values_of(pd, index), index.name), False


# ---------------------------------------------------------------------------------------------------------------------
# Making


def _make_index(pd: Any, children: list[Any], frequency: str | None) -> object:
    values, name = children
    require(is_values(pd, values) and values.ndim == 1, "an index")
    index = pd.Index(values, dtype=values.dtype, name=name, copy=False, tupleize_cols=False)
    if frequency is None:
        return index
    require(matches(FREQUENCY, frequency), "an index")
    require(isinstance(index, (pd.DatetimeIndex, pd.TimedeltaIndex)), "an index")
    try:
        return type(index)(index, freq=frequency)
    except ValueError:  # a name that this version of pandas spells otherwise; the labels are all there
        return index


def _make_range_index(reader: Reader, children: list[Any]) -> object:
    start, stop, step, _ = children
    require(all(type(number) is int for number in (start, stop, step)) and step != 0, "an index")
    # Four numbers, but pandas writes the labels out as soon as it needs them.
    reader.take_labels(len(range(start, stop, step)))
    return _build_range_index(reader, children)


def _range_index(pd: Any, children: list[Any]) -> object:
    start, stop, step, name = children
    return pd.RangeIndex(start, stop, step, name=name)


_build_range_index = with_pandas("pandas.Index", _range_index, name_at=3)


def _make_multi_index(pd: Any, children: list[Any], count: int) -> object:
    require(0 < count <= MAX_INDEX_LEVELS and len(children) == 1 + 2 * count, "an index")
    names, levels, codes = children[0], children[1 : 1 + count], children[1 + count :]
    require(type(names) is list and len(names) == count, "an index")
    require(all(isinstance(level, pd.Index) for level in levels), "an index")
    require(all(columns.is_array(part, "i") and len(part) == len(codes[0]) for part in codes), "an index")
    return pd.MultiIndex(levels=levels, codes=codes, names=names, verify_integrity=True)


def _make_series(pd: Any, children: list[Any]) -> object:
    index, values, name, attrs = children
    require(isinstance(index, pd.Index) and is_values(pd, values) and type(attrs) is dict, "a series")
    require(values.ndim == 1 and len(values) == len(index), "a series")
    series = pd.Series(values, index=index, dtype=values.dtype, name=name, copy=False)
    series.attrs = attrs
    return series


def _make_frame(pd: Any, children: list[Any], rows: int, count: int) -> object:
    index, labels, attrs, *arrays = children
    _check_labels(pd, index, labels, attrs, rows, count)
    require(len(arrays) == count <= MAX_FRAME_COLUMNS, "a table")
    for values in arrays:
        require(is_values(pd, values) and values.ndim == 1 and len(values) == rows, "a table")
    # By position first, because labels may repeat. As series, so that pandas does not guess their dtype.
    series = {
        position: pd.Series(values, index=index, dtype=values.dtype, copy=False)
        for position, values in enumerate(arrays)
    }
    frame = pd.DataFrame(series, index=index, copy=False)
    frame.columns = labels
    frame.attrs = attrs
    return frame


def _make_block(pd: Any, children: list[Any], rows: int, count: int) -> object:
    index, labels, attrs, values = children
    _check_labels(pd, index, labels, attrs, rows, count)
    np: Any = sys.modules["numpy"]
    require(type(values) is np.ndarray and values.shape == (rows, count) and not values.dtype.hasobject, "a table")
    frame = pd.DataFrame(values, index=index, columns=labels, copy=False)
    frame.attrs = attrs
    return frame


def _check_labels(pd: Any, index: Any, labels: Any, attrs: object, rows: int, count: int) -> None:
    require(isinstance(index, pd.Index) and isinstance(labels, pd.Index) and type(attrs) is dict, "a table")
    require(len(index) == rows and len(labels) == count, "a table")


KINDS = {
    "pd.index": Kind(with_pandas("pandas.Index", _make_index, name_at=1), header=((str, NoneType),), children=2),
    "pd.rangeindex": Kind(_make_range_index, children=4),
    "pd.multiindex": Kind(with_pandas("pandas.Index", _make_multi_index), header=(int,), children=ANY_NUMBER),
    "pd.series": Kind(with_pandas("pandas.Series", _make_series, name_at=2), children=4),
    "pd.frame": Kind(with_pandas("pandas.DataFrame", _make_frame), header=(int, int), children=ANY_NUMBER),
    "pd.block": Kind(with_pandas("pandas.DataFrame", _make_block), header=(int, int), children=4),
    **columns.KINDS,
}
