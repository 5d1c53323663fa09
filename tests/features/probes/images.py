"""Images that a step shows."""

from __future__ import annotations

from typing import Any

import PIL.Image

from executor_client.smolagents import capture_images
from tests.features.observe import YES, Seen, probe, run, unforeseen
from tests.features.places import Place

FIGURE = """
import matplotlib.pyplot as plt
plt.figure(figsize=(1, 1))
plt.plot([1, 2])
plt.show()
"""


@probe
def figure_for_the_caller(place: Place) -> str:
    with place.agent(FIGURE, additional_authorized_imports=["matplotlib.*"]) as agent:
        what = run(agent)
        images: Any = getattr(agent.python_executor, "last_images", ())
    if what.steps[0].error is not None:
        return unforeseen(what)
    return YES if any(isinstance(each, PIL.Image.Image) for each in images) else "no: it is nowhere to be had"


@probe
def figure_for_the_model(place: Place) -> str:
    what, counts = _shown(place, FIGURE)
    return YES if counts == (0, 1) else "no" if counts == (0, 0) else unforeseen(what)


@probe
def image_value_for_the_model(place: Place) -> str:
    what, counts = _shown(place, "from PIL import Image\nImage.new('RGB', (8, 4))")
    if counts == (0, 0) and "PIL.Image.Image" in str(what.steps[0].observations):
        return "no: only its repr"
    return YES if counts == (0, 1) else unforeseen(what)


def _shown(place: Place, code: str) -> tuple[Seen, tuple[int, ...]]:
    """A run of code and then an answer, and how many images the model saw with each question."""
    allowed = ["matplotlib.*", "PIL.*"]
    with place.agent(
        code, "final_answer(0)", additional_authorized_imports=allowed, step_callbacks=[capture_images()]
    ) as agent:
        return run(agent), tuple(agent.model.image_counts)
