"""Encodes and decodes numpy arrays and scalars; a torch tensor is encoded, and arrives as an array.

A dtype is described by text of a closed grammar, or by a list of fields of such text; no text of a sender reaches
`numpy.dtype` before it has matched. Objects have no dtype: an array of objects is sent as a shape and a list.

numpy is used when the value being encoded shows that it is loaded, or when a value being decoded needs it. A receiver
without it gets an `OpaqueValue` that names shape and dtype.
"""

from __future__ import annotations

import sys

from executor_api.values.generic import OpaqueValue
from executor_api.values.kinds import BYTES_ENTRY, Kind, get_bytes, matches, put_bytes, without_library
from executor_api.values.limits import SHOWN_ARRAY_BYTES, DecodeError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from executor_api.values.kinds import Lowered, Reader, Writer

MAX_DIMENSIONS = 32
# Fields of one structured dtype, including those of its nested dtypes.
MAX_FIELDS = 512
MAX_FIELD_DEPTH = 6
_DTYPE = (
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)|\|S\d{1,9}|[<>]U\d{1,9}"
    r"|[<>][mM]8(\[\d{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?"
)
_MAX_CHARACTER = 0x10FFFF

# ---------------------------------------------------------------------------------------------------------------------
# Lowering


def lower(value: Any, writer: Writer, *, bases: bool = False) -> Lowered | None:
    """Lowers an array, a numpy scalar or a tensor; with `bases`, also instances of subclasses of numpy's array."""
    np: Any = sys.modules.get("numpy")
    if np is None:
        return None
    kind = type(value)
    if kind is np.ndarray or (bases and issubclass(kind, (np.matrix, np.recarray, np.memmap))):
        return _lower_array(np, value.view(np.ndarray), writer)
    if issubclass(kind, np.generic):
        return _lower_scalar(np, value, writer)
    torch: Any = sys.modules.get("torch")
    if torch is not None and issubclass(kind, torch.Tensor):
        return _lower_array(np, _tensor_as_array(torch, value), writer)
    return None


def _lower_array(np: Any, array: Any, writer: Writer) -> Lowered | None:
    if array.ndim > MAX_DIMENSIONS:
        return None
    shape = list(array.shape)
    writer.expect_bytes(array.size if array.dtype.hasobject else array.nbytes)
    if not _is_shown(np, array):
        return None
    if array.dtype == object:
        return ["np.objects", shape], (array.ravel().tolist(),), False
    description = _describe(np, array.dtype, writer)
    if description is None:
        return None
    order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
    flat = (array.T if order == "F" else np.ascontiguousarray(array)).reshape(-1)
    data = memoryview(flat.view(np.uint8)) if flat.nbytes else b""
    writer.add_unfolded_bytes(-_unshown_bytes(description, flat.nbytes))
    return ["np.array", description, shape, order, put_bytes(writer, data)], (), False


def _lower_scalar(np: Any, value: Any, writer: Writer) -> Lowered | None:
    array = np.asarray(value)
    description = _describe(np, array.dtype, writer)
    if description is None or not _is_shown(np, array):
        return None
    return ["np.scalar", description, put_bytes(writer, array.tobytes())], (), False


def _is_shown(np: Any, array: Any) -> bool:
    """True when numpy can show the array as text; it can't show a datetime without a unit, except NaT."""
    return array.dtype.kind != "M" or np.datetime_data(array.dtype)[0] != "generic" or bool(np.isnat(array).all())


def _unshown_bytes(description: object, size: int) -> int:
    """Returns the bytes of an array that can't be in its text, since numpy writes a thousand numbers at most."""
    has_long_items = type(description) is not str or description[1] in "SU"
    return 0 if has_long_items else max(0, size - SHOWN_ARRAY_BYTES)


def _tensor_as_array(torch: Any, tensor: Any) -> Any:
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16; 32 bits hold each of its values.
    return tensor.float().numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _describe(np: Any, dtype: Any, writer: Writer) -> Any:
    """Returns the description of a dtype; None when there is none that restores the dtype."""
    description = _description_of(dtype)
    if type(description) is list and _make_dtype(np, writer, description, MAX_FIELD_DEPTH, [MAX_FIELDS]) != dtype:
        return None
    return None if dtype.itemsize > writer.limits.total_bytes else description


def _description_of(dtype: Any) -> Any:
    if dtype.names is not None:
        fields = [(name, *dtype.fields[name]) for name in dtype.names]
        return [
            "fields",
            dtype.itemsize,
            [[name, offset, _description_of(inner)] for name, inner, offset, *_ in fields],
        ]
    if dtype.subdtype is not None:
        inner, shape = dtype.subdtype
        return ["repeated", _description_of(inner), list(shape)]
    return dtype.str if matches(_DTYPE, dtype.str) else None


# ---------------------------------------------------------------------------------------------------------------------
# Making


def import_numpy() -> Any:
    """Returns numpy, or None where it is not installed."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _make_array(
    reader: Reader, children: list[Any], description: str | list[Any], shape: list[Any], order: str, data: int | str
) -> object:
    count = _count_of(shape)
    raw = get_bytes(reader, data)
    np = import_numpy()
    if np is None:
        shown = f"array of shape {tuple(shape)} and dtype {description}"[:200]
        return without_library(reader, "numpy", "numpy.ndarray", shown)
    dtype = _dtype_of(np, reader, description)
    if order not in ("C", "F"):
        raise DecodeError("an array is neither in C nor in Fortran order")
    if count * dtype.itemsize != len(raw):
        raise DecodeError(f"an array of {count} items of {dtype.itemsize} bytes has {len(raw)} bytes")
    reader.add_unfolded_bytes(-_unshown_bytes(description, len(raw)))
    array = np.ndarray(shape, dtype, order=order)
    if len(raw):
        # Copied as bytes: a buffer may begin at any address, and numpy is slow with unaligned items.
        array.reshape(-1, order=order).view(np.uint8)[...] = np.frombuffer(raw, np.uint8)
        _check_content(np, array)
    return array


def _make_scalar(reader: Reader, children: list[Any], description: str | list[Any], data: int | str) -> object:
    raw = get_bytes(reader, data)
    np = import_numpy()
    if np is None:
        return without_library(reader, "numpy", "numpy.generic", f"scalar of dtype {description}"[:200])
    dtype = _dtype_of(np, reader, description)
    if dtype.itemsize != len(raw):
        raise DecodeError(f"a scalar of {dtype.itemsize} bytes has {len(raw)} bytes")
    array = np.ndarray((1,), dtype)
    if len(raw):
        array.view(np.uint8)[...] = np.frombuffer(raw, np.uint8)
        _check_content(np, array)
    return array[0]


def _make_objects(reader: Reader, children: list[Any], shape: list[Any]) -> object:
    count = _count_of(shape)
    items = children[0]
    np = import_numpy()
    shown = f"array of shape {tuple(shape)} and dtype object"[:200]
    if np is None:
        return without_library(reader, "numpy", "numpy.ndarray", shown)
    if type(items) is OpaqueValue:
        return OpaqueValue("numpy.ndarray", shown)
    if type(items) is not list or len(items) != count:
        raise DecodeError(f"an array of {count} objects does not hold as many")
    array = np.empty(count, object)
    for position, item in enumerate(items):  # one by one: numpy would look into items that are sequences
        array[position] = item
    return array.reshape(shape)


def _count_of(shape: Sequence[Any]) -> int:
    if len(shape) > MAX_DIMENSIONS or not all(type(length) is int and 0 <= length < 1 << 62 for length in shape):
        raise DecodeError("an array has no proper shape")
    count = 1
    for length in shape:
        count *= length
    return count


def _dtype_of(np: Any, reader: Reader, description: object) -> Any:
    if type(description) is not str:
        return _make_dtype(np, reader, description, MAX_FIELD_DEPTH, [MAX_FIELDS])
    dtype = reader.dtypes.get(description)
    if dtype is None:
        dtype = reader.dtypes[description] = _make_dtype(np, reader, description, 0, [0])
    return dtype


def _make_dtype(np: Any, reader: Reader | Writer, description: Any, depth: int, fields_left: list[int]) -> Any:
    if type(description) is str:
        if not matches(_DTYPE, description):
            raise DecodeError("a dtype is not of the closed list")
        dtype = np.dtype(description)
    else:
        if depth == 0 or type(description) is not list or len(description) != 3:
            raise DecodeError("a dtype is malformed or too deep")
        what, given, inner = description
        if what == "repeated" and type(inner) is list:
            repeated = _make_dtype(np, reader, given, depth - 1, fields_left)
            if _count_of(inner) * repeated.itemsize > reader.limits.total_bytes:
                raise DecodeError("a dtype is larger than a value may be")
            dtype = np.dtype((repeated, tuple(inner)))
        elif what == "fields" and type(given) is int and type(inner) is list:
            fields_left[0] -= len(inner)
            if fields_left[0] < 0:
                raise DecodeError(f"a dtype has more than {MAX_FIELDS} fields")
            dtype = _make_fields(np, reader, given, inner, depth, fields_left)
        else:
            raise DecodeError("a dtype is malformed")
    if dtype.itemsize > reader.limits.total_bytes or dtype.hasobject:
        raise DecodeError("a dtype is larger than a value may be")
    return dtype


def _make_fields(
    np: Any, reader: Reader | Writer, itemsize: int, fields: list[Any], depth: int, fields_left: list[int]
) -> Any:
    names, formats, offsets = [], [], []
    bytes_left = itemsize  # fields that overlap would make the content of one byte be checked many times
    for field in fields:
        if type(field) is not list or len(field) != 3 or type(field[0]) is not str or type(field[1]) is not int:
            raise DecodeError("a field of a dtype is malformed")
        name, offset, description = field
        inner = _make_dtype(np, reader, description, depth - 1, fields_left)
        bytes_left -= inner.itemsize
        if not 0 <= offset <= itemsize - inner.itemsize or bytes_left < 0:
            raise DecodeError("the fields of a dtype do not fit into it")
        names.append(name)
        formats.append(inner)
        offsets.append(offset)
    if not 0 <= itemsize <= reader.limits.total_bytes:
        raise DecodeError("a dtype is larger than a value may be")
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


def _check_content(np: Any, array: Any) -> None:
    """Refuses bytes that no array of the dtype has: numpy accepts them, and its behaviour is then undefined."""
    dtype = array.dtype
    if dtype.names is not None:
        for name in dtype.names:
            _check_content(np, array[name])
    elif array.size == 0 or dtype.itemsize == 0:
        return
    elif not _is_shown(np, array):
        raise DecodeError("an array holds moments without a unit")
    elif dtype.kind == "b":
        if np.ascontiguousarray(array).view(np.uint8).max() > 1:
            raise DecodeError("an array of booleans holds something else")
    elif dtype.kind == "U":
        code_points = np.ascontiguousarray(array).reshape(-1).view(np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if code_points.max() > _MAX_CHARACTER:
            raise DecodeError("an array of text holds something else")


_DESCRIPTION = (str, list)
KINDS = {
    "np.array": Kind(_make_array, header=(_DESCRIPTION, list, str, BYTES_ENTRY)),
    "np.scalar": Kind(_make_scalar, header=(_DESCRIPTION, BYTES_ENTRY)),
    "np.objects": Kind(_make_objects, header=(list,), children=1),
}
