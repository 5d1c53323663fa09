"""A step callback that shows a model the images that its code displayed.

smolagents shows a model the text of a step, and images that a callback puts into `observations_images`. Each later
request sends the step again, so older images are removed, as in smolagents' guide to memory.
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
"""Called with a step and `agent=`, as smolagents calls its `step_callbacks`."""

# Modes of a PNG, in which smolagents sends images to a model, and the nearest ones for other modes.
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_NEAREST_MODES = {"I": "I;16", "I;16B": "I;16", "I;16L": "I;16", "La": "LA", "RGBa": "RGBA", "PA": "RGBA"}


def capture_images(
    *, keep_steps: int = KEEP_STEPS, max_side_px: int = MAX_SIDE_PX, max_images: int = MAX_IMAGES
) -> StepCallback:
    """Returns a callback for `step_callbacks`, which several agents can share.

    It adds the displayed images of a step in order, including figures, and then the step's value if that is an image:
    at most `max_images`, each shrunk to `max_side_px` pixels on its longer side. The last `keep_steps` steps, including
    this one, keep their images; earlier steps lose theirs, including those of other callbacks.

    A failed step keeps its displayed images. For an agent that calls tools instead of writing code, the images are from
    the last call of a `RemotePythonInterpreterTool`. Other kinds of steps are ignored. Raises ValueError for limits
    below 1.
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
    # `last_images` belong to an earlier step unless the executor or tool ran in this one.
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
    """Returns the logs with a numbered line for each displayed image, in order."""
    text, copied, number = "", 0, 0
    for entry in result.image_entries:
        text += result.logs[copied : entry.log_offset]
        copied = entry.log_offset
        number += not entry.problem
        line = f"[an image could not be shown: {entry.problem}]" if entry.problem else f"[image {number}]"
        text += f"{line}\n" if not text or text.endswith("\n") else f"\n{line}\n"
    return text + result.logs[copied:]


# ---------------------------------------------------------------------------------------------------------------------
# Helpers for all callbacks that show images


def forget_images(agent: Any, newest: Any, keep_steps: int) -> None:
    """Drops the images of all steps except the last `keep_steps`, including `newest`.

    Steps are counted by position in memory, because their numbers restart with each run.
    """
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep) and step is not newest]
    for step in steps[: max(0, len(steps) - (keep_steps - 1))]:
        step.observations_images = None


def add_images(step: Any, images: Iterable[PIL.Image.Image], max_side_px: int) -> None:
    """Adds images to a step, in a new list: smolagents shares one list between steps."""
    ready = []
    for image in images:
        try:
            ready.append(_ready(image, max_side_px))
        except (OSError, SyntaxError, ValueError) as error:
            # For example an image of a closed file. An exception here would end the agent's run.
            add_observation(step, f"[an image could not be shown: {error}]")
    if ready:
        step.observations_images = [*(step.observations_images or ()), *ready]


def add_observation(step: Any, text: str) -> None:
    """Adds a line to the step's observation for the model."""
    step.observations = text if step.observations is None else f"{step.observations.rstrip()}\n{text}"


def _ready(image: PIL.Image.Image, max_side_px: int) -> PIL.Image.Image:
    """Returns a copy for a PNG with a limited size. Later changes of the image don't affect it."""
    ready = image.copy() if image.mode in _PNG_MODES else image.convert(_NEAREST_MODES.get(image.mode, "RGB"))
    ready.thumbnail((max_side_px, max_side_px))
    return ready
