"""Images from the sandbox for the model: `capture_images` on agents that really run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import PIL.Image
from smolagents import ActionStep, LogLevel, ToolCallingAgent

from examples.scripted import Reply, ScriptedModel
from executor_client.smolagents import CodeAgent, RemotePythonInterpreterTool, capture_images
from tests.support.agents import agent_on
from tests.support.daemon import Daemon

DRAW = "from PIL import Image\ndef draw(n):\n    return Image.new('RGB', (n, n), (n, 0, 0))\n"
IMPORTS = {"additional_authorized_imports": ["PIL.*", "matplotlib.*"]}


class Onlooker(ScriptedModel):
    """A scripted model that records the sizes of the images in each of its requests."""

    def __init__(self, *replies: str) -> None:
        super().__init__([Reply("", each) for each in replies])
        self.saw: list[list[int]] = []

    def generate(self, messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
        self.saw.append([part["image"].width for part in parts if part["type"] == "image"])
        return super().generate(messages, *args, **kwargs)


def onlooking_agent(daemon: Daemon, *replies: str, **options: Any) -> CodeAgent:
    agent = agent_on(daemon, *replies, step_callbacks=[capture_images()], **IMPORTS, **options)
    agent.model = Onlooker(*replies)
    return agent


def test_a_model_sees_what_its_last_step_displayed_and_nothing_older(daemon: Daemon) -> None:
    figure = "import matplotlib.pyplot as plt\nplt.figure(figsize=(1, 1), dpi=100).add_subplot()\n"
    replies = (
        DRAW + "display(draw(3))\nprint('between')\ndisplay(draw(4))\ndraw(5)",
        figure + "display(draw(6))",
        "print('nothing to see')",
        "final_answer(draw(7))",
    )
    with onlooking_agent(daemon, *replies) as agent:
        answer = agent.run("go", images=[PIL.Image.new("RGB", (900, 1))])
    task = [900]
    seen_figure = agent.model.saw[2][-1]
    assert 50 < seen_figure < 150
    # smolagents puts the task's image into the task and into each step that keeps its images.
    assert agent.model.saw == [task, [*task, *task, 3, 4, 5], [*task, *task, 6, seen_figure], [*task, *task]]
    assert answer.to_raw().size == (7, 7)


def test_the_observation_says_between_which_prints_an_image_was_shown(daemon: Daemon) -> None:
    code = DRAW + "print('before')\ndisplay(draw(3))\nprint('between', end='')\ndisplay(draw(4))\nprint('after')"
    with onlooking_agent(daemon, code, "final_answer(1)") as agent:
        agent.run("go")
        observations = agent.memory.steps[1].observations
    assert observations.startswith("Execution logs:\nbefore\n[image 1]\nbetween\n[image 2]\nafter\n")


def test_a_failed_step_shows_what_it_had_displayed(daemon: Daemon) -> None:
    with onlooking_agent(daemon, DRAW + "display(draw(3))\n1 / 0", "no such thing", "final_answer(1)") as agent:
        agent.run("go")
    assert agent.model.saw == [[], [3], []]


def test_a_step_whose_code_could_not_be_parsed_shows_nothing_old(daemon: Daemon) -> None:
    with onlooking_agent(daemon, DRAW + "display(draw(3))", "", "final_answer(1)") as agent:
        fenced = agent.model.generate

        def without_fences(messages: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
            message = fenced(messages, *args, **kwargs)
            if len(agent.model.saw) == 2:
                message.content = "Let me think."
            return message

        agent.model.generate = without_fences
        agent.run("go")
    assert agent.model.saw == [[], [3], []]


def test_in_a_second_run_older_images_are_dropped_though_step_numbers_begin_again(daemon: Daemon) -> None:
    replies = (DRAW + "display(draw(3))", "display(draw(4))\nfinal_answer(1)", "display(draw(5))", "final_answer(2)")
    with onlooking_agent(daemon, *replies) as agent:
        agent.run("go")
        agent.run("go on", reset=False)
    assert agent.model.saw == [[], [3], [4], [5]]


def test_several_agents_share_one_callback_and_each_sees_its_own(daemon: Daemon) -> None:
    shared = capture_images()
    worker_replies = (DRAW + "display(draw(3))", "final_answer('drawn')")
    worker = agent_on(daemon, *worker_replies, name="worker", description="draws", step_callbacks=[shared], **IMPORTS)
    worker.model = Onlooker(*worker_replies)
    manager_replies = (DRAW + "display(draw(8))\nworker('draw')\nNone", "final_answer(1)")
    manager = agent_on(daemon, *manager_replies, managed_agents=[worker], step_callbacks=[shared], **IMPORTS)
    manager.model = Onlooker(*manager_replies)
    with worker, manager:
        manager.run("go")
    assert (worker.model.saw, manager.model.saw) == ([[], [3]], [[], [8]])


def test_an_agent_that_calls_an_interpreter_sees_what_that_displayed(daemon: Daemon) -> None:
    replies = [
        Reply("", calls=[("python_interpreter", {"code": DRAW + "display(draw(3))"})]),
        Reply("", calls=[("final_answer", {"answer": "done"})], expects=["[image 1]"]),
    ]
    steps: list[ActionStep] = []
    interpreter = RemotePythonInterpreterTool(authorized_imports=["PIL.*"], **daemon.access)
    agent = ToolCallingAgent(
        tools=[interpreter],
        model=ScriptedModel(replies),
        step_callbacks=[capture_images(keep_steps=2), steps.append],
        verbosity_level=LogLevel.OFF,
    )
    with interpreter:
        assert agent.run("go") == "done"
    sizes = [[image.width for image in step.observations_images or ()] for step in steps]
    assert sizes == [[3], []]
