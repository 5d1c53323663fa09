"""Encodes values for the client, and decodes the client's values, in the interpreter."""

from __future__ import annotations

import sys

from executor_api.limits import OUTPUT_VALUE_BYTES_MAX

from ..checks.control import ControlException
from ..checks.failures import text_of
from .display import StandIns

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional, Union

    from executor_api.values.packing import Parts

_MAX_REASON_CHARS = 1000


def encode_value(
    value: object, fallback: Optional[Callable[[object], Optional[bytes]]] = None, *, saves: bool = False
) -> bytes:
    """Encodes a value for the client. Of exceptions in a value's own code, only control exceptions pass."""
    from executor_api.values import encode

    return encode(value, fallback=fallback, passing=(ControlException,), stand_in=StandIns(saves=saves))


def encode_in_parts(value: object) -> Parts:
    """Encodes a value like `encode_value`, but copies nothing large. The parts must be sent at once."""
    from executor_api.values import encode_in_parts as encoded

    return encoded(value, passing=(ControlException,), stand_in=StandIns())


def encode_output(value: object) -> Parts:
    """Encodes the value of a step. Raises EncodeError for a large one, before it is copied."""
    from executor_api.values import OUTPUT_LIMITS
    from executor_api.values import encode_in_parts as encoded

    return encoded(value, OUTPUT_LIMITS, passing=(ControlException,), stand_in=StandIns(saves=True))


def encode_description(value: object, why: BaseException, *, shown: bool) -> Parts:
    """Encodes a description of a value that was not sent: its type and the reason; with `shown`, its size and text."""
    from executor_api.values import EncodeError, OpaqueValue
    from executor_api.values.objects import bounded_repr, type_name_of

    name, text = type_name_of(type(value)), ""
    reason = f"it can't be sent: {type(why).__name__}: {text_of(why)}"[:_MAX_REASON_CHARS]
    if isinstance(why, EncodeError):
        reason = (
            f"larger than the {OUTPUT_VALUE_BYTES_MAX} bytes of a step's value, so only part of its text is here: "
            "look at a part of it, or fetch all of it with evaluate() or get_variables()"
        )
    if shown:
        name = f"{name}{_size_of(value)}"
        text = "\n" + bounded_repr(value, _MAX_REASON_CHARS, passing=(ControlException,))
    return encode_in_parts(OpaqueValue(type_name_of(type(value)), f"<{name}: {reason}>{text}"))


def _size_of(value: Any) -> str:
    try:
        shape = getattr(value, "shape", None)
        return f" of shape {tuple(map(int, shape))}" if isinstance(shape, tuple) else f" of length {len(value)}"
    except Exception:  # noqa: BLE001 (the value's own code)
        return ""


def decode_value(packed: Union[bytes, memoryview]) -> Any:
    """Decodes a value of the client, which may hold cloudpickled objects.

    Raises DecodeError, also for a table if the image has no pandas: a text in its place would be noticed late.
    """
    from executor_api.values import decode

    return decode(packed, foreign=_unpickle, needs_libraries=True)


def _unpickle(data: memoryview) -> Any:
    """Loads an object that the client pickled: `cpMAJOR.MINOR NUL pickle`. Only sandboxes unpickle."""
    import pickle

    version, separator, pickled = bytes(data).partition(b"\0")
    here = b"cp%d.%d" % sys.version_info[:2]
    if not separator or version != here:
        there = version[:16].decode("ascii", "replace")
        raise ValueError(f"an object pickled by {there} can't be loaded here, which is {here.decode()}")
    return pickle.loads(pickled)
