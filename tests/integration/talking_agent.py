"""Runs an agent on this process's terminal whose code prints what consoles find hard. `python -m ... ACCESS`, in JSON.

Its model's words are streamed, and so are those of the agent that it manages: these move on only after the manager's
code has printed another line, so that both are on the terminal at once.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

from smolagents.models import ChatMessageStreamDelta
from smolagents.monitoring import AgentLogger

from examples.scripted import Reply, ScriptedModel
from executor_client.smolagents import CodeAgent

PRINTS = r"""
import sys
print("\x1b[31mred\x1b[0m [bold]markup[/bold]")
for n in range(101):
    print(f"\r{n:3}%|{'#' * (n // 5):20}|", end="", file=sys.stderr, flush=True)
print(file=sys.stderr)
print("文字" * 40)
print("y" * 150)
"""
PRINTS_MEGABYTES = """
for _ in range(64):
    print(("z" * 63 + "\\n") * 1024, end="")
"""
PRINTS_BESIDE_A_HELPER = """
import threading, time
thread = threading.Thread(target=helper, kwargs={"task": "help"})
thread.start()
n = 0
while thread.is_alive():
    n += 1
    print("waiting", n)
    time.sleep(0.01)
"""
WAIT_S = 10.0
# Rich draws the words four times a second, and they are to be there for longer.
LINES_BESIDE_A_WORD = 8


class NotingLogger(AgentLogger):
    """Notes that something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.noted = threading.Event()

    def log(self, *args: Any, **kwargs: Any) -> None:
        super().log(*args, **kwargs)
        self.noted.set()


class PacedModel(ScriptedModel):
    """Says a word after the logger has noted some new lines."""

    def __init__(self, replies: list[Reply], logger: NotingLogger) -> None:
        super().__init__(replies)
        self._noted = logger.noted

    def generate_stream(self, *args: Any, **kwargs: Any) -> Iterator[ChatMessageStreamDelta]:
        for delta in super().generate_stream(*args, **kwargs):
            for _ in range(LINES_BESIDE_A_WORD):
                self._noted.clear()
                if not self._noted.wait(WAIT_S):
                    raise TimeoutError("the manager's code printed nothing")
            yield delta


def main() -> None:
    access = json.loads(sys.argv[1])
    options: dict[str, Any] = {"tools": [], "executor_kwargs": access, "stream_outputs": True}
    logger = NotingLogger()
    words = "I help.\n\nLet me\n\nthink\n\nof it"
    helper_model = PacedModel([Reply(words, "print('inner')"), Reply("Enough.", "final_answer('helped')")], logger)
    model = ScriptedModel(
        [
            Reply("First.", PRINTS),
            Reply("Second.", PRINTS_MEGABYTES),
            Reply("Third.", PRINTS_BESIDE_A_HELPER),
            Reply("Fourth.", "final_answer('all of it')"),
        ]
    )
    with (
        CodeAgent(model=helper_model, name="helper", description="Helps.", **options) as helper,
        CodeAgent(
            model=model,
            managed_agents=[helper],
            additional_authorized_imports=["sys", "threading", "time"],
            logger=logger,
            **options,
        ) as agent,
    ):
        assert agent.run("go") == "all of it"


if __name__ == "__main__":
    main()
