"""The guided tour of smolagents with the agent's code in a sandbox: both kinds of tools, imports, arguments.

Only the import of `CodeAgent` differs from an agent whose code runs in this process. The tools run here: the agent's
code calls them through the daemon, so the password of `Warehouse` never leaves this process.
"""

from __future__ import annotations

from own_daemon import own_daemon
from scripted import Reply, ScriptedModel
from smolagents import Tool, tool

from executor_client.smolagents import CodeAgent


@tool  # type: ignore[untyped-decorator]  # smolagents is untyped
def unit_price(article: str) -> float:
    """Gives the price of one piece in euros.

    Args:
        article: its name, in lower case
    """
    return {"lamp": 49.5, "desk": 310.0}[article]


class Warehouse(Tool):  # type: ignore[misc]  # smolagents is untyped
    name = "in_stock"
    description = "Tells how many pieces of an article are in stock."
    inputs = {"article": {"type": "string", "description": "its name, in lower case"}}  # noqa: RUF012
    output_type = "integer"

    def __init__(self, password: str) -> None:
        super().__init__()
        self._password = password

    def forward(self, article: str) -> int:
        if self._password != "open sesame":
            raise PermissionError("the warehouse does not know you")
        return {"lamp": 12, "desk": 2}[article]


SCRIPT = [
    Reply(
        thought="I look for a price list on the disk.",
        code="import os\nprint(os.listdir('/'))",
    ),
    Reply(
        thought="That is not allowed. The tools tell me what I need.",
        expects=["Import of os is not allowed"],
        code="""
prices = {article: unit_price(article) for article in order}
missing = {article: max(0, wanted - in_stock(article)) for article, wanted in order.items()}
print("prices", prices)
print("missing", missing)
""",
    ),
    Reply(
        thought="Of the <<article>> there are too few. I compute the total of what can be delivered with NumPy.",
        expects=["prices {'lamp': 49.5, 'desk': 310.0}"],
        reads={"article": r"missing .*'(\w+)': [1-9]"},
        code="""
import numpy as np
pieces = np.array([wanted - missing[article] for article, wanted in order.items()])
total = float(pieces @ np.array(list(prices.values())))
final_answer({"total": total, "too few": "<<article>>"})
""",
    ),
]

ORDER = {"lamp": 10, "desk": 3}


def main() -> None:
    with CodeAgent(
        tools=[unit_price, Warehouse("open sesame")],
        model=ScriptedModel(SCRIPT),
        additional_authorized_imports=["numpy.*"],
    ) as agent:
        answer = agent.run(
            "What does this order cost, as far as it can be delivered?", additional_args={"order": ORDER}
        )
    print("The answer:", answer)


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
