"""Inspects a finished run: its steps in memory, the messages for the model, a replay, and the code.

With the code in a sandbox, memory holds the same as ever: values of steps as objects, prints, and for a failed step its
error and its prints.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import ActionStep

from executor_client.smolagents import CodeAgent

SCRIPT = [
    Reply(
        thought="I parse the readings.",
        code="""
print("reading", len(lines), "lines")
readings = [float(line) for line in lines]
""",
    ),
    Reply(
        thought="One of them is no number: I leave it out.",
        expects=["reading 4 lines", "could not convert string to float"],
        reads={"bad": r"to float: '([^']+)'"},
        code="""
readings = [float(line) for line in lines if line != "<<bad>>"]
readings
""",
    ),
    Reply(
        thought="Now the mean.",
        expects=["Last output from code snippet:\n[20.5, 21.0, 22.4]"],
        code="final_answer(round(sum(readings) / len(readings), 2))",
    ),
]


def main() -> None:
    with CodeAgent(tools=[], model=ScriptedModel(SCRIPT)) as agent:
        result = agent.run(
            "What is the mean of the readings?",
            additional_args={"lines": ["20.5", "21.0", "n/a", "22.4"]},
            return_full_result=True,
        )
    print(f"The answer is {result.output} ({result.state}, {len(result.steps)} steps).")

    for step in agent.memory.steps:
        if isinstance(step, ActionStep):
            outcome = type(step.error).__name__ if step.error else f"value {step.action_output!r}"
            print(f"Step {step.step_number}: {outcome}")
    print("Printed before the failure:", agent.memory.steps[1].observations.splitlines()[1])

    messages = agent.write_memory_to_messages()
    print("The model would now be sent:", [message.role.value for message in messages])
    print("All the code:", agent.memory.return_full_code(), sep="\n")
    agent.replay()


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
