"""Runs an agent that ruins its DataFrame, undoes that step, and finishes with what it had before.

With `savepoints="each-step"`, a copy of the interpreter is kept before each step. The tool `undo_last_step` lets the
model go back to it: the table is there again, although the step has changed it in place.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel

from executor_client.smolagents import CodeAgent, UndoTool

SCRIPT = [
    Reply(
        thought="I put the orders into a table.",
        code="""
import pandas as pd
table = pd.DataFrame({
    "item": ["mug", "vase", "bowl", "mug", "plate"],
    "price": ["12.50", "48.00", "n/a", "12.50", "20.00"],
})
print(len(table), "orders")
""",
    ),
    Reply(
        thought="I keep the orders that have a price.",
        expects=["5 orders"],
        code="""
table.drop(table.index[~table["price"].str.isdecimal()], inplace=True)
table.drop(columns="item", inplace=True)
print(len(table), "orders left")
""",
    ),
    Reply(
        thought="None is left: a price with a point is not decimal. And the items are gone. I take that step back.",
        expects=["0 orders left"],
        code="undo_last_step()",
    ),
    Reply(
        thought="The table is as it was before. Now with a number for each price.",
        expects=["Note: Undone"],
        code="""
table["price"] = pd.to_numeric(table["price"], errors="coerce")
print(len(table), "orders,", table["price"].count(), "with a price,", f"{table['price'].sum():.2f} in all")
""",
    ),
    Reply(
        thought="It is <<total>>.",
        reads={"total": r"with a price, ([\d.]+) in all"},
        code="final_answer({'orders': len(table), 'total': <<total>>})",
    ),
]


def main() -> None:
    with CodeAgent(
        tools=[],
        model=ScriptedModel(SCRIPT),
        additional_authorized_imports=["pandas"],
        executor_kwargs={"savepoints": "each-step"},
        verbosity_level=0,
    ) as agent:
        agent.tools["undo_last_step"] = UndoTool(agent.python_executor)
        answer = agent.run("How much are the orders worth?")
        for number, step in enumerate(agent.memory.steps[1:], 1):
            logs = [line for line in step.observations.splitlines() if line.endswith(("orders", "left", "in all"))]
            print(f"Step {number}: {' '.join(logs) or 'nothing printed'}")
        print("The answer:", answer)


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
