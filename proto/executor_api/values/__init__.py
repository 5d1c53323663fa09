"""Packs Python values into bytes with a closed and bounded codec, for both ends of the wire.

    packed = encode(value)      # fails only for size
    value = decode(packed)      # a value or a DecodeError, for any bytes

A value with an exact form arrives unchanged, shared and cyclic containers included. Any other arrives as a value of
this package that names its type: EnumValue, Record (a dataclass), TupleRecord (a named tuple), OpaqueValue (all else).
docs/values.md lists the forms and the format.

Standard library only and CPython 3.9 or newer, as this runs inside every sandbox. numpy, pandas, Pillow and torch are
used when a value shows that they are loaded, or when a value that arrives needs them. The codec contains no pickle, no
evaluation and no import by name.
"""

from __future__ import annotations

from executor_api.values.decode import decode
from executor_api.values.encode import digest, encode, encode_in_parts
from executor_api.values.generic import EnumValue, OpaqueValue, Record, TupleRecord
from executor_api.values.limits import DEFAULT_LIMITS, OUTPUT_LIMITS, DecodeError, EncodeError, ValueLimits

__all__ = [
    "DEFAULT_LIMITS",
    "OUTPUT_LIMITS",
    "DecodeError",
    "EncodeError",
    "EnumValue",
    "OpaqueValue",
    "Record",
    "TupleRecord",
    "ValueLimits",
    "decode",
    "digest",
    "encode",
    "encode_in_parts",
]
