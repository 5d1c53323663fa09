"""The OpenAI Agents SDK with `E2BSandboxClient`: a scripted agent patches a file, runs it, and has a terminal."""

from __future__ import annotations

import asyncio
from typing import Any

from agents import RunConfig, Runner
from agents.extensions.sandbox.e2b import E2BSandboxClient, E2BSandboxClientOptions
from agents.run_config import SandboxRunConfig
from agents.sandbox import Manifest, SandboxAgent
from agents.sandbox.entries import File
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCustomToolCall

PATCH = """*** Begin Patch
*** Update File: prices.py
@@
-    return sum(prices) / 2
+    return sum(prices) / len(prices)
*** End Patch
"""
HEARD: list[str] = []


def shell(call_id: str, command: str, **arguments: Any) -> list[Any]:
    return [function_call("exec_command", {"cmd": command, **arguments}, call_id=call_id)]


def type_into_terminal(call: ModelCall) -> list[Any]:
    number = int(str(call.input[-1]["output"]).partition("session ID ")[2].split()[0])
    return [function_call("write_stdin", {"session_id": number, "chars": "Ada\n"}, call_id="terminal-2")]


def answer(call: ModelCall) -> list[Any]:
    HEARD.extend(str(item.get("output")) for item in call.input if "output" in item)
    return [assistant_message("The mean is fixed.")]


async def main() -> None:
    manifest = Manifest(entries={"prices.py": File(content=b"def mean(prices):\n    return sum(prices) / 2\n")})
    model = ScriptedModel(
        [
            [ResponseCustomToolCall(type="custom_tool_call", name="apply_patch", call_id="patch", input=PATCH)],
            shell("run", "python3 -c 'import prices; print(prices.mean([1, 2, 6]))'"),
            shell("terminal-1", "read -p 'Who? ' name; echo Hello, $name!", tty=True, yield_time_ms=500),
            ModelStep.respond(type_into_terminal),
            ModelStep.respond(answer),
        ]
    )
    agent = SandboxAgent(name="Coder", model=model, default_manifest=manifest)
    # Its default is to pause, which is not offered.
    options = E2BSandboxClientOptions(sandbox_type="e2b", timeout=120, on_timeout="kill", auto_resume=False)
    sandbox = SandboxRunConfig(client=E2BSandboxClient(), options=options)
    config = RunConfig(sandbox=sandbox, tracing_disabled=True)
    result = await Runner.run(agent, "Fix the mean.", run_config=config)
    assert result.final_output == "The mean is fixed."
    assert "3.0" in HEARD[1] and "Who?" in HEARD[2] and "Hello, Ada!" in HEARD[3], HEARD


if __name__ == "__main__":
    asyncio.run(main())
