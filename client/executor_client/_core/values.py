"""Packs values for the sandbox, and unpacks those from it.

To the sandbox: the closed codec; a value without an exact form there is cloudpickled, and only the sandbox loads it.
From the sandbox: the closed codec only. Nothing from a sandbox is ever unpickled, whatever it claims to be.
"""

from __future__ import annotations

import io
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from executor_api.values import DEFAULT_LIMITS, DecodeError, EncodeError, OpaqueValue, ValueLimits, decode, encode

UNDECODABLE = "undecodable value"
_VALUE_BYTES_MAX = ValueLimits().total_bytes


def pack(value: object) -> bytes:
    """Encodes a value for the sandbox. Raises EncodeError, which says what cannot be sent and why."""
    return encode(value, fallback=_pickled_for_sandbox)


def unpack_or_opaque(packed: bytes | memoryview, limits: ValueLimits = DEFAULT_LIMITS) -> Any:
    """Decodes a value from the sandbox; one that breaks the codec's rules becomes an OpaqueValue that says so.

    Otherwise a program could hide its outcome, and its other outputs, behind a broken value.
    """
    try:
        return decode(packed, limits)
    except DecodeError as error:
        return OpaqueValue(UNDECODABLE, f"<{error}>")


def pack_by_value(value: object, modules: Iterable[ModuleType]) -> bytes:
    """Packs an object as a pickle that contains the functions and classes of these modules, which the sandbox lacks."""
    cloudpickle = _cloudpickle()
    with _registering, ExitStack() as until_packed:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                until_packed.callback(cloudpickle.unregister_pickle_by_value, module)
        return encode(_Opaque(value), fallback=lambda opaque: _pickled_for_sandbox(value))


_registering = threading.Lock()
"""cloudpickle has one list of such modules for all threads."""


class _Opaque:
    """A value that the codec has no form for."""

    def __init__(self, value: object) -> None:
        self.value = value


def _pickled_for_sandbox(value: object) -> bytes:
    pickled = _BoundedFile()
    # Pickles of functions and classes hold bytecode: the sandbox refuses them, by this prefix, on another Python.
    pickled.write(b"cp%d.%d\0" % sys.version_info[:2])
    try:
        _cloudpickle().dump(value, pickled)
    except Exception as error:
        # A value's own __reduce__ can raise anything.
        raise EncodeError(f"a {type(value).__name__} cannot be sent: {type(error).__name__}: {error}") from error
    return pickled.getvalue()


class _BoundedFile(io.BytesIO):
    """Accepts as many bytes as a value may have, so that a larger one is refused before it fills the memory."""

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > _VALUE_BYTES_MAX:
            raise EncodeError(f"pickled it takes more than the limit total_bytes of {_VALUE_BYTES_MAX}")
        return super().write(data)


def _cloudpickle() -> Any:
    # Imported on first need: most programs send plain data, and the import costs more than an execution.
    import cloudpickle

    return cloudpickle
