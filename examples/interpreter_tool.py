"""A `ToolCallingAgent`, which calls tools by JSON, with an interpreter tool whose code runs in a sandbox.

`RemotePythonInterpreterTool` replaces smolagents' `PythonInterpreterTool`, whose code runs in this process. Beware of
`add_base_tools=True`, which adds smolagents' own interpreter; after `register(base_tools=True)` it adds ours.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import ToolCallingAgent, tool

from executor_client.smolagents import RemotePythonInterpreterTool


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def temperatures(city: str) -> str:
    """Gives the temperatures of the last days, in degrees Celsius.

    Args:
        city: its name
    """
    return {"Bern": "11.5 14.0 9.5 13.0"}[city]


SCRIPT = [
    Reply(thought="First the data.", calls=[("temperatures", {"city": "Bern"})]),
    Reply(
        thought="I keep them in a variable, for more than one question.",
        reads={"data": r"([\d.]+(?: [\d.]+)+)"},
        calls=[
            (
                "python_interpreter",
                {"code": "import statistics\ndays = [float(day) for day in '<<data>>'.split()]\nstatistics.mean(days)"},
            )
        ],
    ),
    Reply(
        thought="The mean is <<mean>>. Which days were warmer?",
        reads={"mean": r"Output: ([\d.]+)"},
        calls=[("python_interpreter", {"code": "print('warmer:', [day for day in days if day > <<mean>>])"})],
    ),
    Reply(
        thought="That is what was asked.",
        reads={"warm": r"warmer: \[(.*)\]"},
        calls=[("final_answer", {"answer": "warmer than usual: <<warm>>"})],
    ),
]


def main() -> None:
    with RemotePythonInterpreterTool(timeout_seconds=10) as interpreter:
        agent = ToolCallingAgent(tools=[temperatures, interpreter], model=ScriptedModel(SCRIPT))
        answer = agent.run("Which days in Bern were warmer than the mean?")
    print("The answer:", answer)


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
