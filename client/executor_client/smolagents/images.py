"""A step callback that lets a model see what its code displayed.

smolagents shows a model the text of a step; of images only what a callback puts into `observations_images`. Each step
is sent to the model again with all that follow, so older images are taken out, as smolagents' guide to memory does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import PIL.Image
from smolagents import ActionStep
from smolagents.agent_types import AgentType

from executor_client import ExecutionResult

KEEP_STEPS = 1
MAX_SIDE_PX = 1_024
MAX_IMAGES = 8

StepCallback = Callable[..., None]
"""Called with a step and `agent=`, as smolagents calls those of `step_callbacks`."""

# What a PNG can hold, which is how smolagents sends images to a model; and what is nearest to the others.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_NEAREST_MODES = {"I": "I;16", "I;16B": "I;16", "I;16L": "I;16", "La": "LA", "RGBa": "RGBA", "PA": "RGBA"}


def capture_images(
    *, keep_steps: int = KEEP_STEPS, max_side_px: int = MAX_SIDE_PX, max_images: int = MAX_IMAGES
) -> StepCallback:
    """Makes a callback for `step_callbacks`, which any number of agents can share.

    It adds to a step, in this order: what the code displayed (figures included), in order, and the step's value when
    that is an image; `max_images` at most, each shrunk to `max_side_px` on its longer side. Images stay in the last
    `keep_steps` steps, this one included, and are dropped from those before, whoever put them there.

    A step that failed keeps what it had displayed. Of an agent that calls tools instead of writing code, it takes what
    the last call of a `RemotePythonInterpreterTool` displayed. Steps of other kinds are let pass. Raises ValueError for
    limits below 1.
    """
    for name, value in (("keep_steps", keep_steps), ("max_side_px", max_side_px), ("max_images", max_images)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")

    def capture(memory_step: Any, agent: Any) -> None:
        if not isinstance(memory_step, ActionStep):
            return
        forget_images(agent, memory_step, keep_steps)
        shown = _shown_images(memory_step, agent)
        add_images(memory_step, shown[:max_images], max_side_px)
        if len(shown) > max_images:
            add_observation(memory_step, f"[{len(shown) - max_images} more images of this step are not shown]")

    return capture


def _shown_images(step: Any, agent: Any) -> list[PIL.Image.Image]:
    images: list[PIL.Image.Image] = []
    # Of what did not run in this step, the images are of one before.
    if step.code_action is not None:
        images.extend(getattr(getattr(agent, "python_executor", None), "last_images", ()))
    else:
        called = {call.name for call in step.tool_calls or ()}
        for tool in (tool for name, tool in agent.tools.items() if name in called):
            images.extend(getattr(getattr(tool, "executor", None), "last_images", ()))
    value = step.action_output.to_raw() if isinstance(step.action_output, AgentType) else step.action_output
    if isinstance(value, PIL.Image.Image):
        images.append(value)
    return images


def logs_with_images(result: ExecutionResult) -> str:
    """The logs, with a line for each displayed image where it belongs between the prints, by its number."""
    text, taken, number = "", 0, 0
    for entry in result.image_entries:
        text += result.logs[taken : entry.log_offset]
        taken = entry.log_offset
        number += not entry.problem
        said = f"[an image could not be shown: {entry.problem}]" if entry.problem else f"[image {number}]"
        text += f"{said}\n" if not text or text.endswith("\n") else f"\n{said}\n"
    return text + result.logs[taken:]


# ---------------------------------------------------------------------------------------------------------------------
# For other callbacks that show images


def forget_images(agent: Any, newest: Any, keep_steps: int) -> None:
    """Drops the images of all steps but the last `keep_steps`, `newest` included.

    Steps are counted as they stand in memory: their numbers begin again with each run.
    """
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep) and step is not newest]
    for step in steps[: max(0, len(steps) - (keep_steps - 1))]:
        step.observations_images = None


def add_images(step: Any, images: Iterable[PIL.Image.Image], max_side_px: int) -> None:
    """Adds images behind those that the step has. The list may be shared between steps, so it is made anew."""
    ready = []
    for image in images:
        try:
            ready.append(_ready(image, max_side_px))
        except (OSError, SyntaxError, ValueError) as error:
            # One of the user's own that cannot be read any more, say. An exception here would end the agent's run.
            add_observation(step, f"[an image could not be shown: {error}]")
    if ready:
        step.observations_images = [*(step.observations_images or ()), *ready]


def add_observation(step: Any, text: str) -> None:
    """Adds a line to what the model is told of the step."""
    step.observations = text if step.observations is None else f"{step.observations.rstrip()}\n{text}"


def _ready(image: PIL.Image.Image, max_side_px: int) -> PIL.Image.Image:
    """A copy, so that what the code or the user does with the image later changes no memory."""
    ready = image.copy() if image.mode in _PNG_MODES else image.convert(_NEAREST_MODES.get(image.mode, "RGB"))
    ready.thumbnail((max_side_px, max_side_px))
    return ready
