"""What a kind of tools may add to what is known of plain Python callables."""

from __future__ import annotations

from typing import Any

from executor_client._shipping.writer import StandIn


class Dialect:
    """How a library's tools are shipped to where the library is not. This one knows of none."""

    carries_bytecode = True
    """Whether a tool without source makes sense in the sandbox as a pickle, which can have no stand-ins."""

    def stand_in(self, value: object) -> StandIn | None:
        """Source that takes the place of this object of the library."""
        return None

    def reduced(self, value: object) -> tuple[Any, ...] | None:
        """How to make the object again, as `__reduce__` says it; a `StandIn` may be the callable."""
        return None

    def refusal(self, value: object) -> str | None:
        """Why the object can't be shipped."""
        return None

    def ships_module(self, module: str) -> bool:
        """Whether the source of this installed module is shipped, because the sandbox could not import it."""
        return False

    def drops_decorator(self, decorator: object) -> bool:
        """Whether this decorator only makes a tool of a function."""
        return False

    def is_machinery(self, function: object) -> bool:
        """Whether the library, not the user, put this function into a class."""
        return False
