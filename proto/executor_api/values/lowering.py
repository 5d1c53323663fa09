"""Finds the function that lowers a value: by its type, by the libraries that are loaded, or by its attributes."""

from __future__ import annotations

import sys

from executor_api.values import containers, objects, scalars, times

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    from executor_api.values.kinds import Lowered, Writer

    Modules = tuple[Any, ...]

    class Encoder(Writer, Protocol):
        def libraries(self) -> Modules: ...


# Types with an exact form. Those of modules that may not be loaded are found by name, and kept if it is the real class.
_LOWER: dict[Any, Any] = {**scalars.LOWER, **containers.LOWER, **objects.LOWER}
_LOWER_BY_NAME: dict[tuple[str, str], Any] = {
    **scalars.LOWER_BY_NAME,
    **times.LOWER_BY_NAME,
    **containers.LOWER_BY_NAME,
}


def lower_exact(value: object, kind: type, encoder: Encoder) -> Lowered | None:
    """Lowers a value whose own type has a form; None where it has none."""
    lower = _LOWER.get(kind) or _find_by_name(kind)
    if lower is not None:
        result: Lowered | None = lower(value, encoder)
        return result
    for library in encoder.libraries():
        lowered: Lowered | None = library.lower(value, encoder)
        if lowered is not None:
            return lowered
    return None


def loaded_libraries() -> Modules:
    """Returns the modules for values of libraries that are loaded; no others can have values here.

    They are imported here, since most sandboxes need none of them.
    """
    loaded: list[Any] = []
    if "numpy" in sys.modules or "torch" in sys.modules:
        from executor_api.values import arrays

        loaded.append(arrays)
    if "pandas" in sys.modules:
        from executor_api.values import frames

        loaded.append(frames)
    if "PIL.Image" in sys.modules:
        from executor_api.values import images

        loaded.append(images)
    return tuple(loaded)


def _find_by_name(kind: type) -> Any:
    # pathlib became a package in 3.13, and its classes live one level down there.
    module = kind.__module__.partition(".")[0] if type(kind.__module__) is str else ""
    lower = _LOWER_BY_NAME.get((module, kind.__name__))
    if lower is None or getattr(sys.modules.get(module), kind.__name__, None) is not kind:
        return None
    _LOWER[kind] = lower
    return lower


def lower_inexact(value: object, kind: type, encoder: Encoder) -> Lowered | None:
    """Lowers a value by a base of its type that has a form, else by its attributes; None where that can't be."""
    for library in encoder.libraries():
        lowered: Lowered | None = library.lower(value, encoder, bases=True)
        if lowered is not None:
            return lowered
    return objects.lower_generic(value, encoder)
