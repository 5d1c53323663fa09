"""A backend for matplotlib that needs no display: Agg, whose show() sends the open figures to the caller.

matplotlib finds it by MPLBACKEND=module://executor_guest.interpreter.mpl_backend.
"""

from __future__ import annotations

from typing import Any

from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg

from .display import show_open_figures

__all__ = ["FigureCanvas", "FigureManager", "RendererAgg", "show"]

FigureCanvas = FigureCanvasAgg
FigureManager = FigureManagerBase


def show(*_args: Any, **_kwargs: Any) -> None:
    """plt.show()."""
    show_open_figures()
