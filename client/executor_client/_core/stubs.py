"""A stub whose methods are those of another stub at the moment of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class CurrentStub:
    """The methods of the stub that `current` returns when one is called: a session may move between two attempts."""

    def __init__(self, current: Callable[[], Any]) -> None:
        self._current = current

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(self._current(), name)(*args, **kwargs)

        return call
