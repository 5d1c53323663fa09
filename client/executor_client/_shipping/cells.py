"""Checks variables of closures that several of the user's functions and classes share."""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass, field

from executor_client._shipping.source import all_codes
from executor_client._shipping.writer import Writer


@dataclass
class _Use:
    variable: str
    cell: types.CellType
    functions: set[int] = field(default_factory=set)
    classes: set[str] = field(default_factory=set)
    rebound: bool = False


class Cells:
    """Refuses shared variables that shipping would silently separate.

    Shipped functions still share a variable, but a class statement gets a variable of its own. The difference shows
    only if one of them rebinds the variable.
    """

    def __init__(self) -> None:
        self._uses: dict[int, _Use] = {}

    def note(self, function: types.FunctionType, *, of_class: bool = False) -> None:
        """Records the variables of a function or method that was shipped."""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            use = self._uses.setdefault(id(cell), _Use(variable, cell))
            if of_class:
                use.classes.add(function.__code__.co_qualname.rpartition(".")[0])
            else:
                use.functions.add(id(function))
            use.rebound = use.rebound or _rebinds(function.__code__, variable)

    def finish(self, writer: Writer) -> None:
        """Refuses the variables that are rebound and shared with a class."""
        for use in self._uses.values():
            if use.rebound and use.classes and len(use.classes) + len(use.functions) > 1:
                classes = ", ".join(sorted(each.rpartition("<locals>.")[2] for each in use.classes))
                writer.refuse(
                    use.variable, f"is rebound (nonlocal) and shared with the class {classes}; make it an attribute"
                )


def _rebinds(code: types.CodeType, variable: str) -> bool:
    return any(
        instruction.opname in ("STORE_DEREF", "DELETE_DEREF") and instruction.argval == variable
        for each in all_codes(code)
        if variable in each.co_freevars
        for instruction in dis.get_instructions(each)
    )
