"""Python values as bytes, by a closed and bounded codec, for both ends of the wire.

    packed = encode(value)      # never fails but for size
    value = decode(packed)      # a value or a DecodeError, whatever the bytes are

What has an exact form arrives as it was, shared and cyclic containers included. What has none arrives as a value of
this package that tells its type: EnumValue, Record (a dataclass), TupleRecord (a named tuple), OpaqueValue (all else).
docs/values.md lists the forms and the format.

Standard library only and CPython 3.9 or newer, as this runs inside every sandbox. numpy, pandas, Pillow and torch are
used when a value shows that they are loaded, or when one that arrives needs them. There is no pickle in here, no
evaluation and no import by name.
"""

from __future__ import annotations

from executor_api.values.decode import decode
from executor_api.values.encode import encode
from executor_api.values.generic import EnumValue, OpaqueValue, Record, TupleRecord
from executor_api.values.limits import DecodeError, EncodeError, ValueLimits

__all__ = [
    "DecodeError",
    "EncodeError",
    "EnumValue",
    "OpaqueValue",
    "Record",
    "TupleRecord",
    "ValueLimits",
    "decode",
    "encode",
]
