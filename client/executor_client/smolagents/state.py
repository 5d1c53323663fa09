"""`executor.state`: the variables of the session, read when they are asked for.

smolagents' local executor keeps the variables of the code in a dict of this process, and its users read and set them
there, between steps. Here they are in the sandbox: each look asks the session, and nothing is kept.

What smolagents itself looks for in that dict, `_print_outputs`, is kept by the executor and is no variable.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import Any

PRINT_OUTPUTS = "_print_outputs"

BOOKKEEPING = frozenset({PRINT_OUTPUTS, "_operations_count", "__name__"})
"""Names that smolagents' local executor keeps for itself in the state that it shares with the agent: no variables."""

Read = Callable[[Iterable[str] | None], dict[str, Any]]
Write = Callable[[Mapping[str, Any]], None]


class SessionState(MutableMapping[str, Any]):
    """`state["x"]` is the variable's value now, `state["x"] = 1` sets it, as `send_variables` does.

    Iterating shows the names that `Session.get_variables()` does, those of data, and `_print_outputs`; a module, a
    function or a private name can be asked for by its name. `items()` and `dict(state.items())` ask the session once,
    each `state[name]` once more.

    Raises KeyError for a variable that there is not, also where no code has run yet; EvaluationError when the session
    cannot be asked: it is gone, or runs code just now. Variables can't be deleted from here: TypeError.

    `own` holds what smolagents keeps for itself, and is written to for that.
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
        raise TypeError("variables of a session are deleted by its code only: del, in a step")

    def __contains__(self, name: object) -> bool:
        try:
            self[name]  # type: ignore[index]  # anything may be asked for
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
        return f"<{type(self).__name__}: the variables of the session, read when asked for>"
