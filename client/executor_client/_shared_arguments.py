"""Notices a host tool that changes its arguments, which the program in the sandbox does not see.

What a tool is called with was copied on its way here. A tool that fills a list it was given works with a local
executor and silently does nothing with a remote one; so the first such call of a session is warned of. It is looked for
after the answer is sent, in small arguments only, and in so many calls of a session: a hint must cost next to nothing.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from executor_api.values import EncodeError, ValueLimits, encode
from executor_client._limits import ARGUMENT_BYTES_COMPARED_MAX, CALLS_COMPARED_MAX, TOOL_NAME_SHOWN_MAX
from executor_client._values import unpack

_log = logging.getLogger(__name__)

# More than was given, so that what has grown is found by that and not by encoding all of it.
_LIMITS = ValueLimits(nodes=ARGUMENT_BYTES_COMPARED_MAX, total_bytes=4 * ARGUMENT_BYTES_COMPARED_MAX)
_CONTAINERS = (list, dict, set, bytearray)
_LIBRARIES = ("numpy", "pandas")


class Arguments(NamedTuple):
    """The arguments that the program gave a tool; `packed` as they came, None where that is too large to compare."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    packed: bytes | None

    @classmethod
    def received(cls, args: tuple[Any, ...], kwargs: dict[str, Any], packed: bytes) -> Arguments:
        """Keeps no second form of a large value while the tool runs and while its result is packed."""
        return cls(args, kwargs, packed if len(packed) <= ARGUMENT_BYTES_COMPARED_MAX else None)

    def to_compare(self) -> Arguments | None:
        """None for what is not compared: it need not be kept until the answer has been sent."""
        return None if self.packed is None else self


class ArgumentWatch:
    """Looks at the calls of one session until it has warned, or has looked at enough of them."""

    def __init__(self) -> None:
        self._calls_left = CALLS_COMPARED_MAX

    def look(self, name: str, given: Arguments) -> None:
        """To be called when the tool has returned and its answer is sent."""
        if self._calls_left <= 0 or given.packed is None:
            return
        if not any(map(_can_change, (*given.args, *given.kwargs.values()))):
            return
        self._calls_left -= 1
        if _has_changed(given, given.packed):
            self._calls_left = 0
            _log.warning(
                "the host tool %r changed an argument: the code in the sandbox has its own copy and does not see that; "
                "let the tool return what it changed (said once for each session)",
                name[:TOOL_NAME_SHOWN_MAX],
            )


def _can_change(value: object) -> bool:
    return isinstance(value, _CONTAINERS) or type(value).__module__.partition(".")[0] in _LIBRARIES


def _has_changed(given: Arguments, packed: bytes) -> bool:
    try:
        now = encode((given.args, given.kwargs), _LIMITS)
    except EncodeError:
        return True  # it was far smaller when it came
    except Exception:  # noqa: BLE001 - the tool may go on with it in a thread; what matters is that its call is answered
        return False
    # Most values are encoded here as they were there. The others are compared with what they were when they came.
    return now != packed and now != encode(unpack(packed), _LIMITS)
