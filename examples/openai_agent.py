"""Runs an agent of the OpenAI Agents SDK whose shell, files, terminal and server are in a session's sandbox.

The run pauses for an approval, which ends its sandbox. The resumed run has another one, with the files of a snapshot.
The model is scripted: no network, no key.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from agents import RunConfig, Runner, RunState, function_tool
from agents.run_config import SandboxRunConfig
from agents.sandbox import LocalSnapshotSpec, Manifest, SandboxAgent
from agents.sandbox.entries import File
from agents.testing import ModelCall, ModelStep, ScriptedModel, assistant_message, function_call
from openai.types.responses import ResponseCustomToolCall
from own_daemon import own_daemon

from executor_client.integrations.openai_agents import RemoteSandboxClient, RemoteSandboxClientOptions

PATCH = """*** Begin Patch
*** Update File: prices.py
@@
-    return sum(prices) / 2
+    return sum(prices) / len(prices)
*** End Patch
"""
CHECK = "python3 -c 'import prices; print(prices.mean([1, 2, 6]))'"


@function_tool(needs_approval=True)
async def publish(text: str) -> str:
    """Publishes a text. A person approves it first."""
    return f"published: {text}"


def shell(call_id: str, cmd: str, **arguments: Any) -> list[Any]:
    return [function_call("exec_command", {"cmd": cmd, **arguments}, call_id=call_id)]


def type_into_terminal(call: ModelCall) -> list[Any]:
    """Types a name into the program on a terminal; the number of the terminal is in the previous answer."""
    number = int(str(call.input[-1]["output"]).partition("session ID ")[2].split()[0])
    return [function_call("write_stdin", {"session_id": number, "chars": "Ada\n"}, call_id="terminal-2")]


def scripted_model() -> ScriptedModel:
    patch = ResponseCustomToolCall(type="custom_tool_call", name="apply_patch", call_id="patch", input=PATCH)
    return ScriptedModel(
        [
            shell("before", CHECK),
            [patch],
            shell("after", CHECK),
            shell("terminal-1", "read -p 'Who are you? ' name; echo Hello, $name!", tty=True, yield_time_ms=300),
            ModelStep.respond(type_into_terminal),
            [function_call("publish", {"text": "the mean is fixed"}, call_id="publish")],
            shell("resumed", f"cat notes.txt; {CHECK}"),
            [assistant_message("The mean is fixed.")],
        ]
    )


async def run() -> None:
    manifest = Manifest(
        entries={
            "prices.py": File(content=b"def mean(prices):\n    return sum(prices) / 2\n"),
            "notes.txt": File(content=b"Written before the run.\n"),
        }
    )
    agent = SandboxAgent(name="Coder", model=scripted_model(), default_manifest=manifest, tools=[publish])
    with tempfile.TemporaryDirectory() as directory:
        sandbox = SandboxRunConfig(client=RemoteSandboxClient(), snapshot=LocalSnapshotSpec(base_path=Path(directory)))
        config = RunConfig(sandbox=sandbox, tracing_disabled=True)
        result = await Runner.run(agent, "Fix the mean, then publish it.", run_config=config)
        print("Approve:", result.interruptions[0].name)

        stored = json.dumps(result.to_state().to_json())
        state = await RunState.from_json(agent, json.loads(stored))
        state.approve(state.get_interruptions()[0])
        result = await Runner.run(agent, state, run_config=config)
    for item in result.to_input_list():
        if item.get("type") in ("function_call_output", "custom_tool_call_output"):
            print(f"{item['call_id']}:", str(item["output"]).strip().splitlines()[-1])
    print("The answer:", result.final_output)


async def serve() -> None:
    """A sandbox without an agent, with a port that is reached from here."""
    client = RemoteSandboxClient()
    session = await client.create(options=RemoteSandboxClientOptions(exposed_ports=(8000,)))
    async with session:
        await session.exec("echo 'Hello from the sandbox' > index.html")
        await session.pty_exec_start("python3 -m http.server 8000", yield_time_s=0.3)
        await session.exec("bash -c 'until : < /dev/tcp/127.0.0.1/8000; do sleep 0.1; done'", timeout=20)
        endpoint = await session.resolve_exposed_port(8000)
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(b"GET /index.html HTTP/1.0\r\n\r\n")
        print("The page:", (await reader.read()).decode().splitlines()[-1])
        writer.close()


def main() -> None:
    asyncio.run(run())
    asyncio.run(serve())


if __name__ == "__main__":
    with own_daemon("local"):
        main()
