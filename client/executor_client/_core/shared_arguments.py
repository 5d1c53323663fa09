"""Notices a host tool that changes its arguments, which the program in the sandbox does not see.

A tool's arguments are copies. A tool that fills a list argument works with a local executor and silently does nothing
with a remote one, so the first such call of a session is logged as a warning. To cost almost nothing, the comparison
runs after the answer is sent, for small arguments, and for a limited number of calls.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from executor_api.values import EncodeError, ValueLimits, decode, encode
from executor_client._core.limits import ARGUMENT_BYTES_COMPARED_MAX, CALLS_COMPARED_MAX, TOOL_NAME_SHOWN_MAX

_log = logging.getLogger(__name__)

# More than any compared argument had, so that one that has grown fails early instead of being encoded whole.
_LIMITS = ValueLimits(nodes=ARGUMENT_BYTES_COMPARED_MAX, total_bytes=4 * ARGUMENT_BYTES_COMPARED_MAX)
_CONTAINERS = (list, dict, set, bytearray)
_LIBRARIES = ("numpy", "pandas")


class Arguments(NamedTuple):
    """The arguments of a tool call; `packed` as they arrived, None if they are too large to compare."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    packed: bytes | memoryview | None

    @classmethod
    def received(cls, args: tuple[Any, ...], kwargs: dict[str, Any], packed: bytes | memoryview) -> Arguments:
        """Drops the packed form of large arguments, to save memory while the tool runs."""
        return cls(args, kwargs, packed if len(packed) <= ARGUMENT_BYTES_COMPARED_MAX else None)

    def to_compare(self) -> Arguments | None:
        """Returns the arguments to compare after the answer; None: they may be freed earlier."""
        return None if self.packed is None else self


class ArgumentWatch:
    """Compares the calls of one session until it has warned or reached the limit."""

    def __init__(self) -> None:
        self._calls_left = CALLS_COMPARED_MAX

    def compare(self, name: str, given: Arguments) -> None:
        """Compares a call's arguments with their packed form. Call it after the answer is sent."""
        if self._calls_left <= 0 or given.packed is None:
            return
        if not any(map(_can_change, (*given.args, *given.kwargs.values()))):
            return
        self._calls_left -= 1
        if _has_changed(given, given.packed):
            self._calls_left = 0
            _log.warning(
                "the host tool %r changed an argument, but the code in the sandbox has its own copy; return the "
                "changed value from the tool (logged once for each session)",
                name[:TOOL_NAME_SHOWN_MAX],
            )


def _can_change(value: object) -> bool:
    return isinstance(value, _CONTAINERS) or type(value).__module__.partition(".")[0] in _LIBRARIES


def _has_changed(given: Arguments, packed: bytes | memoryview) -> bool:
    try:
        now = encode((given.args, given.kwargs), _LIMITS)
    except EncodeError:
        return True  # it arrived far smaller
    except Exception:  # noqa: BLE001 - a thread of the tool may still change it; that must not fail the call
        return False
    # Most values have the same encoding here and in the sandbox. The others are compared after a round trip.
    return now != packed and now != encode(decode(packed), _LIMITS)
