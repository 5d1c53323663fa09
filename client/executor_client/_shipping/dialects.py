"""The rules of a library for shipping its tools, beyond those for plain Python callables."""

from __future__ import annotations

from typing import Any

from executor_client._shipping.writer import StandIn


class Dialect:
    """Ships a library's tools to a sandbox without the library. This base class knows no library."""

    carries_bytecode = True
    """True if a tool without source may be sent as a pickle, which cannot contain stand-ins."""

    def stand_in(self, value: object) -> StandIn | None:
        """Returns source that replaces this object of the library; None for other objects."""
        return None

    def reduced(self, value: object) -> tuple[Any, ...] | None:
        """Returns the object in the form of `__reduce__`, or None; a `StandIn` may be the callable."""
        return None

    def refusal(self, value: object) -> str | None:
        """Returns the reason why the object can't be shipped, or None."""
        return None

    def ships_module(self, module: str) -> bool:
        """Returns True if this installed module's source is shipped, because the sandbox can't import it."""
        return False

    def drops_decorator(self, decorator: object) -> bool:
        """Returns True if this decorator only turns a function into a tool."""
        return False

    def is_machinery(self, function: object) -> bool:
        """Returns True if the library, not the user, put this function into a class."""
        return False
