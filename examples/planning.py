"""An agent that plans, and a person who reads the plan, changes it, stops the run and resumes it.

`agent.interrupt()` takes effect between two steps. The sandbox is kept, so a run with `reset=False` goes on with all
variables of the agent's code.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import ActionStep, AgentError
from smolagents.memory import PlanningStep

from executor_client.smolagents import CodeAgent

SCRIPT = [
    Reply(thought="1. Guess the number of words. 2. Answer."),
    Reply(
        thought="The plan tells me to count.",
        expects=["1. Count the words. 2. Answer."],
        code="words = len(text.split())\nprint('counted', words)",
    ),
    # The run is stopped here and resumed by the next one, which starts with a plan.
    Reply(thought="They are counted: 1. Answer.", expects=["counted 9"]),
    Reply(thought="The count is still there.", code="final_answer(words)"),
]
TASK = "How many words has the text?"
TEXT = "the quick brown fox jumps over the lazy dog"


class Reviewer:
    """Plays a person at the keyboard."""

    def after_plan(self, step: PlanningStep, agent: CodeAgent) -> None:
        print("A plan:", step.model_output_message.content)
        step.plan = step.plan.replace("Guess the number of words", "Count the words")

    def after_step(self, step: ActionStep, agent: CodeAgent) -> None:
        if not step.is_final_answer:
            agent.interrupt()


def main() -> None:
    reviewer = Reviewer()
    with CodeAgent(
        tools=[],
        model=ScriptedModel(SCRIPT),
        planning_interval=3,
        step_callbacks={PlanningStep: reviewer.after_plan, ActionStep: reviewer.after_step},
    ) as agent:
        try:
            agent.run(TASK, additional_args={"text": TEXT})
        except AgentError as stopped:
            print("Stopped:", stopped)
        print("In memory:", [type(step).__name__ for step in agent.memory.steps])
        answer = agent.run(TASK, reset=False)
    print("The answer:", answer)


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
