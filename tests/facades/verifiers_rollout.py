"""verifiers: one rollout on its E2B runtime, with a model on this machine that answers by a script.

The harness is ours, because verifiers' own ones download their programs into the sandbox.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Any

import httpx
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.clients import EvalClientConfig
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.interception.server import InterceptionServer, InterceptionServerConfig
from verifiers.v1.interception.tunnel import CustomTunnelConfig
from verifiers.v1.runtimes.e2b import E2BConfig, E2BRuntime

SCRIPT = "echo $((6 * 7)) > answer.txt; cat data.txt"


async def completion(request: web.Request) -> web.Response:
    """Answers every request with the command."""
    assert (await request.json())["messages"][-1]["content"] == "What is six times seven?"
    message = {"role": "assistant", "content": SCRIPT}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
    )


class Commands(vf.Harness):
    """Asks the model once, and runs its answer as a command in the sandbox."""

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, *_: Any
    ) -> vf.ProgramResult:
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}) as client:
            answer = (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status().json()
        return await runtime.run_program(["sh", "-c", answer["choices"][0]["message"]["content"]], {})


class Multiply(vf.Task):
    """Scored by the file that the command leaves."""

    async def setup(self, trace: Any, runtime: Any) -> None:
        await runtime.write("data.txt", b"given\n")

    @vf.reward
    async def right(self, runtime: Any) -> float:
        return float((await runtime.read("answer.txt")).strip() == b"42")


async def main() -> None:
    application = web.Application()
    application.router.add_post("/v1/chat/completions", completion)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    # A template for each image: the gateway's configuration names it.
    box = E2BConfig(workdir="/home/user/app")
    assert E2BRuntime(box)._template_name() == os.environ["VERIFIERS_TEMPLATE"], E2BRuntime(box)._template_name()
    client = EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="E2B_API_KEY")
    config = AgentConfig(model="scripted", client=client, runtime=box, harness={"id": "null"})
    # The harness runs here, so the model's address need not be public.
    server = InterceptionServer(
        InterceptionServerConfig(tunnel=CustomTunnelConfig(url="http://127.0.0.1:8117", port=8117)),
        requires_tunnel=True,
    )
    async with server:
        agent = vf.Agent(config, interception=server)
        agent.harness = Commands(agent.harness.config)
        trace = await agent.run(Multiply(vf.TaskData(idx=0, prompt="What is six times seven?")))
    await runner.cleanup()
    assert trace.ok, trace.errors
    assert trace.rewards["right"].score == 1.0, trace.rewards
    assert trace.num_turns == 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as home:
        os.environ["HOME"] = home
        asyncio.run(main())
