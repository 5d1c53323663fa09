"""An evaluation of Inspect: its tools run in a sandbox for each sample.

Needs `pip install 'remote-executor[server,inspect-ai]'`. The model is a script. With a
real one: `inspect eval examples/inspect_eval.py --model PROVIDER/MODEL`.
"""

from __future__ import annotations

import tempfile
from typing import Any

from inspect_ai import Task, eval, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessage, ChatMessageTool, ModelOutput, ModelUsage, get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import bash, python
from own_daemon import own_daemon


@task
def arithmetic() -> Task:
    return Task(
        dataset=[
            Sample(input="How many lines has numbers.txt?", target="3", files={"numbers.txt": "20\n21\n1\n"}),
            Sample(input="How many lines has numbers.txt?", target="2", files={"numbers.txt": "20\n21\n"}),
        ],
        solver=[use_tools(bash(timeout=30), python(timeout=30)), generate()],
        scorer=includes(),
        sandbox="remote",
    )


def step(messages: list[ChatMessage], *_: Any) -> ModelOutput:
    """Counts the lines by the tool `bash`, and answers with what it printed."""
    last = messages[-1]
    if isinstance(last, ChatMessageTool):
        output = ModelOutput.from_content("mockllm/model", last.text)
    else:
        output = ModelOutput.for_tool_call("mockllm/model", "bash", {"command": "wc -l < numbers.txt"})
    output.usage = ModelUsage()  # to count tokens, Inspect would download tables
    return output


def main() -> None:
    with tempfile.TemporaryDirectory() as logs:
        model = get_model("mockllm/model", custom_outputs=step, memoize=False)
        (log,) = eval(arithmetic(), model=model, display="none", log_dir=logs, retry_on_error=1)
        assert log.samples is not None
        for sample in log.samples:
            assert sample.scores is not None
            print(f"sample {sample.id}: {sample.scores['includes'].value}")


if __name__ == "__main__":
    with own_daemon("local"):  # not needed where a daemon runs already
        main()
