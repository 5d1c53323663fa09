"""numpy, pandas, Pillow and torch: what arrives where they are, and where they are not."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType

import dateutil.tz  # type: ignore[import-untyped]  # comes with pandas, without types
import numpy as np
import pandas as pd
import polars
import pyarrow
import pytest
from PIL import Image

from executor_api.values import DecodeError, EncodeError, OpaqueValue, ValueLimits, decode, encode

STRUCTURED = np.dtype(
    [("id", "<i4"), ("name", "<U3"), ("at", "<M8[s]"), ("inner", [("flag", "?"), ("xy", "<f8", (2,))])]
)
ARRAYS = [
    *(
        np.zeros(3, dtype)
        for dtype in ("?", "i1", "u2", "<i8", ">i4", "f2", "f4", ">f8", "c8", "c16", "S4", "<U5", ">U2")
    ),
    *(np.array(["2024-01-01", "NaT"], dtype) for dtype in ("M8[D]", "M8[ns]", "M8[25s]")),
    *(np.array([1, -5], "m8[us]"), np.array([-(2**63)]).view("M8"), np.array(5), np.array("text"), np.array([], "U")),
    *(np.arange(24.0).reshape(2, 3, 4), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(100)[::7]),
    *(np.zeros((0, 5)), np.zeros((3, 0), "<U2"), np.array([np.nan, np.inf, -0.0]), np.ones((2, 2), order="F") > 0),
    *(np.zeros(2, STRUCTURED), np.zeros(1, np.dtype([("a", "i1"), ("b", "i8")], align=True)), np.arange(5_000)),
]
SCALARS = [
    *(np.int64(5), np.uint8(255), np.float16(1.5), np.float64("nan"), np.complex64(1 + 2j), np.bool_(True)),
    *(np.str_("é"), np.str_(""), np.bytes_(b"x"), np.datetime64("2024-01-01T00:00:00", "ms"), np.timedelta64(5, "h")),
    np.zeros(1, STRUCTURED)[0],
]


def same_array(left: np.ndarray, right: np.ndarray) -> bool:
    kinds = (type(left), left.dtype, left.shape, left.flags.f_contiguous) == (
        *(type(right), right.dtype, right.shape, right.flags.f_contiguous),
    )
    return kinds and left.tobytes() == right.tobytes()


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype.str}{array.shape}")
def test_an_array_arrives_as_it_was_and_can_be_written(array: np.ndarray) -> None:
    received = decode(encode(array))
    assert same_array(received, array if array.flags.forc else np.ascontiguousarray(array))
    assert received.flags.writeable
    assert received.flags.owndata or received.base.flags.owndata


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda scalar: type(scalar).__name__)
def test_a_numpy_scalar_arrives_as_it_was(scalar: np.generic) -> None:
    received = decode(encode([scalar]))[0]
    assert type(received) is type(scalar)
    assert (received.dtype, received.tobytes()) == (scalar.dtype, scalar.tobytes())


def test_an_array_of_objects_arrives_with_its_objects() -> None:
    array = np.empty((2, 2), object)
    array[0, 0], array[0, 1], array[1, 0] = [1, 2], {"a": array[0:1, 1:]}, "x"
    received = decode(encode(array))
    assert (received.shape, received.dtype, received[0, 0], received[1, 1]) == ((2, 2), object, [1, 2], None)
    assert decode(encode(np.array(["a", "b"] * 50, object))).tolist() == ["a", "b"] * 50


def test_an_array_that_contains_itself_ends() -> None:
    array = np.empty(2, object)
    array[:] = [array, array]
    assert isinstance(decode(encode(array))[0][0], (np.ndarray, OpaqueValue))


def test_arrays_of_other_classes_arrive_as_arrays_unless_that_loses_content() -> None:
    assert same_array(
        decode(encode(np.rec.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]).view(np.recarray)["a"])), np.array([1], "i4")
    )
    assert isinstance(decode(encode(np.ma.array([1, 2], mask=[True, False]))), OpaqueValue)
    assert isinstance(decode(encode(np.zeros(2, "V3"))), OpaqueValue)
    assert isinstance(decode(encode(np.longdouble(1))), OpaqueValue)


def test_ten_megabytes_of_array_use_one_buffer_beside_a_small_tree() -> None:
    array = np.arange(1_250_000.0)
    assert 0 < len(encode(array)) - array.nbytes < 200


# ---------------------------------------------------------------------------------------------------------------------
# pandas


def frame() -> pd.DataFrame:
    columns = {
        "int": [1, 2, 3],
        "float": [1.5, np.nan, -0.0],
        "text": ["é", None, "z"],
        "objects": pd.Series([1, [2], pd.Timestamp("2024", tz="UTC")], dtype=object),
        "Int64": pd.array([1, None, 3], "Int64"),
        "Float32": pd.array([1.5, None, 3], "Float32"),
        "boolean": pd.array([True, None, False], "boolean"),
        "string": pd.array(["a", None, "é"], "string"),
        "category": pd.Categorical(["u", None, "u"], ["z", "u"], ordered=True),
        "cut": pd.cut([1, 2, 3], 2),
        "naive": pd.date_range("2024", periods=3),
        "seconds": np.array(["2024", "NaT", "2025"], "M8[s]"),
        "zoned": pd.date_range("2024", periods=3, tz="Europe/Paris"),
        "fixed": pd.date_range("2024", periods=3, tz="+02:00"),
        "delta": pd.to_timedelta([1, None, 3], unit="s"),
        "period": pd.period_range("2024", periods=3, freq="M"),
        ("a", 1): np.array([1, 2, 3], "u1"),
    }
    return pd.DataFrame(columns)


FRAMES = [
    frame(),
    frame().set_index("zoned"),
    frame().set_index(["text", "category", "period"]),
    frame().groupby("cut", observed=False)[["int"]].sum(),
    pd.DataFrame(),
    pd.DataFrame(index=[1, 2]),
    pd.DataFrame(columns=["a", "b"]),
    pd.DataFrame(np.arange(6.0).reshape(2, 3)),
    pd.DataFrame([[1, "a"]], columns=["same", "same"], index=["x"]),
    pd.DataFrame(np.ones((2, 2)), columns=pd.MultiIndex.from_product([["a"], [1, 2]], names=["p", None])),
    pd.DataFrame({"a": [1, 2]}, index=pd.date_range("2024", periods=2, freq="D", name="day")),
    pd.DataFrame({"a": [1, 2]}, index=pd.RangeIndex(5, 1, -2, name=("r", 1))),
    pd.DataFrame({"a": [["x"] * 3, "y"]}).explode("a"),
]


@pytest.mark.parametrize("value", FRAMES, ids=lambda value: f"{value.shape}")
def test_a_table_arrives_as_it_was(value: pd.DataFrame) -> None:
    received = decode(encode(value))
    pd.testing.assert_frame_equal(received, value, check_freq=True, check_column_type=True)
    assert type(received.index) is type(value.index)


@pytest.mark.parametrize("name", list(frame().columns), ids=str)
def test_a_column_arrives_as_it_was(name: object) -> None:
    series = frame()[name].rename(("name", 1))
    series.attrs["unit"] = "m"
    received = decode(encode(series))
    pd.testing.assert_series_equal(received, series)
    assert received.attrs == {"unit": "m"}
    pd.testing.assert_index_equal(decode(encode(pd.Index(series))), pd.Index(series), exact=True)


@pytest.mark.parametrize(
    "value",
    [
        *(
            pd.Timestamp("2024-02-29 12:00", tz="Europe/Paris"),
            pd.Timestamp(1, unit="ns"),
            pd.Timestamp("2024").as_unit("s"),
        ),
        *(pd.Timedelta(5, "ms"), pd.Period("2024-01", "M"), pd.Interval(0, 1.5, "both")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_scalar_of_pandas_arrives_as_it_was(value: object) -> None:
    received = decode(encode(value))
    assert type(received) is type(value)
    assert received == value
    assert getattr(received, "unit", None) == getattr(value, "unit", None)


def test_missing_values_of_pandas_stay_what_they_are() -> None:
    received = decode(encode([pd.NA, pd.NaT]))
    assert received[0] is pd.NA
    assert received[1] is pd.NaT


def test_a_column_of_a_kind_that_is_not_carried_arrives_as_its_objects() -> None:
    received = decode(encode(pd.Series(pd.arrays.SparseArray([0, 1]))))
    assert (received.dtype, received.tolist()) == (object, [0, 1])


def test_a_table_with_a_part_too_large_for_the_limits_becomes_opaque() -> None:
    limits = ValueLimits(nodes=1_000)
    value = pd.DataFrame({"a": pd.Series([1, "a"] * 1_000, dtype=object)})
    assert isinstance(decode(encode([value], limits), limits)[0], OpaqueValue)


WIDE = {
    "columns of several types": lambda: pd.DataFrame({n: pd.array([n], dtype="Int64") for n in range(12_000)}),
    "levels": lambda: pd.MultiIndex.from_arrays([[1, 2]] * 200),
    "series": lambda: [pd.Series([n]) for n in range(400)],
    "indexes": lambda: [pd.Index([n]) for n in range(400)],
    "categories": lambda: [pd.Categorical([n]) for n in range(400)],
    "images": lambda: [Image.new("L", (1, 1)) for _ in range(400)],
}


@pytest.mark.parametrize("name", WIDE)
def test_many_parts_that_are_costly_to_make_become_opaque_with_the_reason(name: str) -> None:
    """Each costs a receiver 50 to 200 microseconds and a kilobyte: 100,000 columns once took 28 seconds."""
    received = decode(encode(WIDE[name](), ValueLimits(nodes=20_000)))
    last = received[-1] if isinstance(received, list) else received
    assert isinstance(last, OpaqueValue)
    assert last.repr.startswith("<not sent as a value: ")
    assert "at most" in last.repr or "more than the limit of 20,000 nodes" in last.repr


def test_a_wide_table_of_one_type_arrives_since_it_is_one_array() -> None:
    assert decode(encode(pd.DataFrame(np.zeros((2, 100_000))))).shape == (2, 100_000)


# ---------------------------------------------------------------------------------------------------------------------
# Pillow


def image(mode: str) -> Image.Image:
    made = Image.new("RGBA", (7, 5))
    made.putdata([(x * 7, 255 - x * 5, x, 255 - x * 3) for x in range(35)])
    if mode in ("I", "F", "I;16"):
        plain = Image.new(mode, (7, 5))
        plain.putdata([x * 1_000 for x in range(35)])
        return plain
    return made.convert("RGB").convert(mode) if mode not in ("RGBA", "LA") else made.convert(mode)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16", "F", "CMYK", "YCbCr", "HSV", "LAB", "RGBX"]
)
def test_an_image_arrives_pixel_by_pixel(mode: str) -> None:
    value = image(mode)
    received = decode(encode(value))
    assert type(received) is Image.Image
    assert (received.mode, received.size) == (value.mode, value.size)
    if mode == "P":  # PNG keeps the colours that are used, and not their numbers
        received, value = received.convert("RGB"), value.convert("RGB")
    assert received.tobytes() == value.tobytes()


def test_an_image_from_a_file_arrives_without_what_else_the_file_said(tmp_path: Path) -> None:
    image("P").save(tmp_path / "i.png", transparency=3, dpi=(1, 1), icc_profile=b"profile", exif=Image.Exif())
    received = decode(encode(Image.open(tmp_path / "i.png")))
    assert received.info == {"transparency": 3}


def test_an_image_without_pixels_or_with_too_many_becomes_opaque() -> None:
    limits = ValueLimits(image_pixels=10)
    assert isinstance(decode(encode(Image.new("RGB", (0, 5)))), OpaqueValue)
    assert isinstance(decode(encode(Image.new("RGB", (4, 5)), limits)), OpaqueValue)


def test_images_share_the_limit_of_pixels() -> None:
    value, limits = [Image.new("L", (4, 5)), Image.new("L", (4, 5))], ValueLimits(image_pixels=30)
    assert [type(item) for item in decode(encode(value, limits), limits)] == [Image.Image, OpaqueValue]
    packed = encode(value)
    with pytest.raises(DecodeError, match="more than the limit of 30 pixels"):
        decode(packed, ValueLimits(image_pixels=30))


# ---------------------------------------------------------------------------------------------------------------------
# Absent libraries, and one that is not here


def test_without_the_libraries_their_values_arrive_opaque_and_the_rest_as_it_was() -> None:
    packed = encode(
        [1, np.zeros(3), np.float32(1), pd.DataFrame({"a": ["x"]}), image("L"), np.array([None]), {"a": (2,)}]
    )
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['numpy', 'pandas', 'PIL']))\n"  # None: importing it raises ImportError
        "from executor_api.values import decode\n"
        "value = decode(sys.stdin.buffer.read())\n"
        "assert value[0] == 1 and value[-1] == {'a': (2,)}, value\n"
        "print([item.type_name for item in value[1:-1]])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=packed, capture_output=True, timeout=60, check=True)
    names = ["numpy.ndarray", "numpy.generic", "pandas.DataFrame", "PIL.Image.Image", "numpy.ndarray"]
    assert done.stdout.decode().strip() == repr(names)


def test_a_table_goes_to_a_python_without_arrow_and_polars_and_comes_back() -> None:
    """A sandbox's image and its client's environment seldom have the same libraries."""
    table = pd.DataFrame(
        {
            "text": pd.array(["a", None], "string[pyarrow]"),
            "usual": ["x", None],
            "label": pd.Series(pd.array(["u", "v"], "string[pyarrow]")).astype("category"),
            "number": pd.array([1, None], "int64[pyarrow]"),
        },
        index=pd.Index(["p", "q"], dtype="string[pyarrow]"),
    )
    packed = encode([table, pyarrow.table({"a": [1]}), polars.DataFrame({"a": [1]})])
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['pyarrow', 'polars']))\n"
        "from executor_api.values import decode, encode\n"
        "value = decode(sys.stdin.buffer.read())\n"
        "assert not value[0].empty and value[0].dtypes['text'].storage == 'python', repr(value)\n"
        "sys.stdout.buffer.write(encode(value))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], input=packed, capture_output=True, timeout=60, check=True)
    received, *others = decode(done.stdout)
    assert received.astype(object).fillna("-").equals(table.astype(object).fillna("-"))
    assert received["text"].dtype == "string" and list(received["label"].cat.categories) == ["u", "v"]
    assert [other.type_name for other in others] == ["pyarrow.lib.Table", "polars.dataframe.frame.DataFrame"]


@pytest.mark.parametrize(
    ("value", "library"), [(np.zeros(3), "numpy"), (pd.Timestamp("2024"), "pandas"), (image("L"), "Pillow")]
)
def test_a_receiver_that_needs_the_libraries_refuses_what_it_cannot_make(value: object, library: str) -> None:
    program = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['numpy', 'pandas', 'PIL']))\n"
        "from executor_api.values import DecodeError, decode\n"
        "try:\n    decode(sys.stdin.buffer.read(), needs_libraries=True)\n"
        "except DecodeError as error:\n    print(error)\n"
    )
    packed = encode([value])
    done = subprocess.run([sys.executable, "-c", program], input=packed, capture_output=True, timeout=60, check=True)
    assert f"this Python has no {library}. Use an image that has {library}" in done.stdout.decode()


def test_a_zone_of_another_library_arrives_by_its_key_or_its_offset() -> None:
    received = decode(
        encode(
            [
                datetime.datetime(2024, 7, 1, tzinfo=dateutil.tz.gettz("Europe/Paris")),
                datetime.datetime(2024, 7, 1, tzinfo=dateutil.tz.tzoffset("x", 3_600)),
                dateutil.tz.UTC,
            ]
        )
    )
    assert received[0].isoformat() == "2024-07-01T00:00:00+02:00"
    assert received[1].isoformat() == "2024-07-01T00:00:00+01:00"
    assert received[2] is datetime.UTC


def test_a_tensor_arrives_as_an_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch itself is not among the things that tests install; this has the part of its interface that is used."""

    class Tensor:
        dtype = "float32"

        def detach(self) -> Tensor:
            return self

        def cpu(self) -> Tensor:
            return self

        def float(self) -> Tensor:
            return self

        def numpy(self) -> np.ndarray:
            return np.ones(2, "f4")

    torch = ModuleType("torch")
    torch.Tensor, torch.bfloat16 = Tensor, "bfloat16"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert same_array(decode(encode(Tensor())), np.ones(2, "f4"))


def test_a_large_table_is_refused_before_it_is_copied() -> None:
    frame = pd.DataFrame({name: np.zeros(1_000_000) for name in "ab"})
    limits = ValueLimits(total_bytes=1 << 20, nodes=1_000)
    tracemalloc.start()
    with pytest.raises(EncodeError):
        encode(frame, limits)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()
    mixed = pd.DataFrame({"a": ["x", 1] * 1_000}, dtype=object)
    shown = decode(encode(mixed, limits), limits)
    assert isinstance(shown, OpaqueValue) and "of several types" in shown.repr and "x" in shown.repr
