"""Saves and loads an agent: the loaded agent runs in a sandbox again, with its saved limits, or it is not loaded.

smolagents alone saves an agent that was given an executor as "local", and runs its code in your process after loading.
The saved files hold no token: the loading side uses its own.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import smolagents
from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import InferenceClientModel, tool

from executor_client.smolagents import CodeAgent


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def rainfall(month: int) -> float:
    """Gives the rainfall of a month in millimetres.

    Args:
        month: 1 to 12
    """
    return 60.0 + 2.5 * month


SCRIPT = [
    Reply(
        thought="I wait for the newest figures.",
        code="while True:\n    pass",
    ),
    Reply(
        thought="There is a time limit. The figures that there are must do.",
        expects=["exceeded the maximum execution time"],
        code='print("summer:", sum(rainfall(month) for month in (6, 7, 8)))',
    ),
    Reply(thought="That is it.", reads={"total": r"summer: ([\d.]+)"}, code="final_answer(<<total>>)"),
]


def main() -> None:
    agent = CodeAgent(
        tools=[rainfall],
        model=InferenceClientModel("some/model", token="hf-of-the-saving-side"),
        executor_kwargs={"limits": {"wall_time_s": 1}},
    )
    with tempfile.TemporaryDirectory() as folder:
        agent.save(folder)
        saved = json.loads((Path(folder) / "agent.json").read_text())
        print("Saved:", saved["executor_type"], saved["executor_kwargs"])

        use("from the folder", CodeAgent.from_folder(folder))
        use("from the dict", CodeAgent.from_dict(agent.to_dict()))

        try:
            smolagents.CodeAgent.from_folder(folder)
        except ValueError as refusal:
            print("smolagents' own class:", refusal)


def use(origin: str, agent: CodeAgent) -> None:
    """Runs a loaded agent. Its model was saved too; here the script replaces it."""
    agent.model = ScriptedModel(SCRIPT)
    with agent:
        answer = agent.run("How much rain fell in summer?")
    print(f"Loaded {origin}: {answer} on {type(agent.python_executor).__name__}")


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
