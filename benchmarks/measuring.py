"""Measures rows one by one: one that can't be measured, or fails, does not affect the others."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.references import Unmeasurable
from benchmarks.rows import measurement

_REASON_CHARS = 300


@dataclass(frozen=True)
class Row:
    """The figures of one measurement, and the reason where some or all of them are missing."""

    name: str
    figures: tuple[Figure, ...]
    missing: str = ""
    failed: bool = False
    """True when it should have been possible."""


def measure(bench: Bench, name: str) -> Row:
    """Never raises an Exception: each becomes the row's reason. Others, such as KeyboardInterrupt, pass through."""
    figures: list[Figure] = []
    try:
        # One by one: what was measured before a failure counts.
        for figure in measurement(name)(bench):
            figures.append(figure)
    except Unmeasurable as reason:
        return Row(name, tuple(figures), str(reason))
    except ImportError as error:
        return Row(name, tuple(figures), f"not here: {_described(error)}")
    except Exception as error:  # noqa: BLE001 - a row is any code; the others are measured all the same
        bench.drop_dead()
        return Row(name, tuple(figures), f"failed: {_described(error)}", failed=True)
    return Row(name, tuple(figures))


def _described(error: Exception) -> str:
    """Omits the file of this machine that an ImportError names: the reason may be written to a page of the project."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if isinstance(error, ImportError) and error.path:
        text = text.replace(f" ({error.path})", "")
    return " ".join(text.split())[:_REASON_CHARS]
