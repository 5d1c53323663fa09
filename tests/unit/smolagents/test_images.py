"""The images that `capture_images` puts into memory, on agents with a fake executor that has displayed some."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
from smolagents import ActionStep
from smolagents.agent_types import AgentImage
from smolagents.memory import FinalAnswerStep, PlanningStep, TaskStep
from smolagents.monitoring import Timing

from executor_client import ExecutionResult, Image, Outcome, VariablesState
from executor_client.smolagents import capture_images
from executor_client.smolagents.images import logs_with_images


def picture(width: int = 4, height: int = 3, mode: str = "RGB") -> PIL.Image.Image:
    return PIL.Image.new(mode, (width, height))


def agent_that_showed(*images: PIL.Image.Image) -> Any:
    return SimpleNamespace(
        memory=SimpleNamespace(steps=[TaskStep(task="look", task_images=[picture()])]),
        python_executor=SimpleNamespace(last_images=list(images)),
        tools={},
    )


def step(number: int = 1, *, code: str | None = "display()", **fields: Any) -> ActionStep:
    return ActionStep(step_number=number, timing=Timing(start_time=0.0), code_action=code, **fields)


def sizes(shown: ActionStep) -> list[tuple[int, int]] | None:
    return None if shown.observations_images is None else [image.size for image in shown.observations_images]


def test_displayed_images_come_in_order_and_the_value_last() -> None:
    shown = step(action_output=picture(7, 7))
    capture_images()(shown, agent=agent_that_showed(picture(1, 1), picture(2, 2)))
    assert sizes(shown) == [(1, 1), (2, 2), (7, 7)]


def test_the_images_of_the_task_stay_in_front_and_their_list_is_not_changed() -> None:
    """smolagents gives the same list to every step of a run."""
    given = [picture(9, 9)]
    shown = step(observations_images=given)
    capture_images()(shown, agent=agent_that_showed(picture(1, 1)))
    assert sizes(shown) == [(9, 9), (1, 1)] and len(given) == 1


def test_memory_holds_copies() -> None:
    shown, original = step(), picture()
    capture_images()(shown, agent=agent_that_showed(original))
    original.putpixel((0, 0), (255, 0, 0))
    assert shown.observations_images[0].getpixel((0, 0)) == (0, 0, 0)


@pytest.mark.parametrize(
    ("keep_steps", "left"),
    [(1, [False, False, False]), (2, [False, False, True]), (5, [True] * 3), (9, [True] * 3)],
)
def test_images_of_older_steps_are_dropped_by_their_place_in_memory(keep_steps: int, left: list[bool]) -> None:
    """Not by their number, which restarts with each run of a conversation."""
    agent = agent_that_showed(picture())
    older = [step(number, observations_images=[picture()]) for number in (1, 2, 1)]
    agent.memory.steps += older
    newest = step(2)
    capture_images(keep_steps=keep_steps)(newest, agent=agent)
    assert [each.observations_images is not None for each in older] == left
    assert sizes(newest) == [(4, 3)]


def test_a_step_already_in_memory_is_not_dropped_by_itself() -> None:
    agent = agent_that_showed(picture())
    newest = step()
    agent.memory.steps.append(newest)
    capture_images()(newest, agent=agent)
    assert sizes(newest) == [(4, 3)]


def test_large_images_are_shrunk_and_small_ones_left() -> None:
    shown = step()
    capture_images(max_side_px=100)(
        shown, agent=agent_that_showed(picture(1000, 500), picture(90, 3), picture(1, 5000))
    )
    assert sizes(shown) == [(100, 50), (90, 3), (1, 100)]


def test_more_images_than_are_shown_are_counted() -> None:
    shown = step(observations="Execution logs:\n")
    capture_images(max_images=2)(shown, agent=agent_that_showed(*[picture(n, n) for n in range(1, 6)]))
    assert sizes(shown) == [(1, 1), (2, 2)]
    assert shown.observations == "Execution logs:\n[3 more images of this step are not shown]"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "I", "I;16", "PA", "RGBa", "F", "CMYK", "HSV", "YCbCr"])
def test_an_image_of_any_mode_can_be_sent_to_a_model(mode: str) -> None:
    from smolagents.utils import encode_image_base64

    shown = step()
    capture_images(max_side_px=2)(shown, agent=agent_that_showed(picture(mode=mode)))
    assert sizes(shown) == [(2, 2)]
    assert encode_image_base64(shown.observations_images[0])


def test_an_image_that_cannot_be_read_any_more_is_reported_and_ends_no_run(tmp_path: Any) -> None:
    path = tmp_path / "cut.png"
    PIL.Image.effect_noise((200, 200), 50).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    shown = step(action_output=PIL.Image.open(path))
    with shown.action_output:
        capture_images()(shown, agent=agent_that_showed())
    assert shown.observations_images is None and "could not be shown" in str(shown.observations)


def test_a_step_without_code_does_not_show_the_images_of_the_one_before() -> None:
    """The reply had no code that could be parsed, so the executor was not called."""
    shown = step(code=None)
    capture_images()(shown, agent=agent_that_showed(picture()))
    assert shown.observations_images is None


def test_agents_without_an_executor_and_steps_of_other_kinds_are_let_pass() -> None:
    tool_calling = SimpleNamespace(memory=SimpleNamespace(steps=[]), tools={"other": object()})
    shown = step(code=None, action_output=AgentImage(picture(5, 5)))
    capture = capture_images()
    capture(shown, agent=tool_calling)
    assert sizes(shown) == [(5, 5)]
    capture(FinalAnswerStep(output=picture()), agent=tool_calling)
    capture(PlanningStep([], None, "plan", Timing(0.0)), agent=tool_calling)


@pytest.mark.parametrize("limit", ["keep_steps", "max_side_px", "max_images"])
def test_limits_below_one_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=limit):
        capture_images(**{limit: 0})


@pytest.mark.parametrize(
    ("logs", "places", "expected"),
    [
        ("a\nb\n", [2], "a\n[image 1]\nb\n"),
        ("ab", [1], "a\n[image 1]\nb"),
        ("", [0, 0], "[image 1]\n[image 2]\n"),
        ("a\n", [0, -2, 2], "[image 1]\na\n[an image could not be shown: odd]\n[image 2]\n"),
        ("a\n", [], "a\n"),
    ],
)
def test_logs_say_where_an_image_was_shown(logs: str, places: list[int], expected: str) -> None:
    """A negative place is that of an image with a problem."""
    png = io.BytesIO()
    picture().save(png, "PNG")
    entries = tuple(
        Image(png.getvalue(), "image/png", "display", 1, 1, refusal="odd" if place < 0 else "", log_offset=abs(place))
        for place in places
    )
    result = ExecutionResult(
        execution_id="1",
        outcome=Outcome.SUCCEEDED,
        state=VariablesState.KEPT,
        generation=1,
        logs=logs,
        image_entries=entries,
    )
    assert logs_with_images(result) == expected
