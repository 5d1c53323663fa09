"""`executor.state`: the variables of the session, read from the sandbox on each access.

smolagents' local executor keeps the code's variables in a dict of this process, where users read and set them between
steps. Here they are in the sandbox: each access is a request to the session, and nothing is cached.

The entry `_print_outputs`, which smolagents reads, is kept by the executor and is not a variable.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any

PRINT_OUTPUTS = "_print_outputs"

BOOKKEEPING = frozenset({PRINT_OUTPUTS, "_operations_count", "__name__"})
"""Names of smolagents' bookkeeping in the state, which are not variables."""

Read = Callable[[Iterable[str] | None], dict[str, Any]]
Write = Callable[[Mapping[str, Any]], None]


class SessionState(MutableMapping[str, Any]):
    """A mapping of the session's variables: `state["x"]` reads one, `state["x"] = 1` sets it as `send_variables` does.

    Iteration yields the names of `Session.get_variables()`, which are data, and `_print_outputs`; modules, functions
    and private names can be read by name. `items()` and `dict(state.items())` make one request, each `state[name]`
    another.

    Raises KeyError for an unknown variable, or before any code has run; EvaluationError if the session is gone or is
    running code; TypeError for a deletion, which only code in the session can do.

    `own` holds smolagents' bookkeeping, and is modified when smolagents sets it.
    """

    def __init__(self, read: Read, write: Write, own: dict[str, Any]) -> None:
        self._read = read
        self._write = write
        self._own = own

    def __getitem__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        if not str(name).isidentifier() or name in BOOKKEEPING:
            raise KeyError(name)
        return self._read([name])[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in BOOKKEEPING:
            self._own[name] = value
        else:
            self._write({name: value})

    def __delitem__(self, name: str) -> None:
        raise TypeError("only code in the session can delete variables: use del in a step")

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]  # any object may be tested
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def items(self) -> ItemsView[str, Any]:
        return self._all().items()

    def values(self) -> ValuesView[Any]:
        return self._all().values()

    def _all(self) -> dict[str, Any]:
        return {**self._read(None), **self._own}

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: the variables of the session, read on access>"
