"""LiteLLM's sandbox calls, and its code interpreter tool, with its provider "e2b"."""

from __future__ import annotations

import asyncio
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would look for prices on the Internet

import litellm


async def main() -> None:
    base = f"https://api.{os.environ['E2B_DOMAIN']}"
    box = await litellm.acreate_sandbox(provider="e2b", api_base=base, timeout=120)
    assert box.domain == os.environ["E2B_DOMAIN"], box
    first = await litellm.arun_code(provider="e2b", container=box, code="x = 6\nprint('out')")
    assert (first.stdout, first.error) == ("out\n", None), first
    second = await litellm.arun_code(provider="e2b", container=box, code="x * 7")
    assert [result["text"] for result in second.results] == ["42"], second
    failed = await litellm.arun_code(provider="e2b", container=box, code="[][1]")
    assert failed.error is not None and failed.error["name"] == "IndexError", failed
    assert await litellm.adelete_sandbox(provider="e2b", container=box)
    assert not await litellm.adelete_sandbox(provider="e2b", container=box)
    once = await litellm.acode_interpreter_tool(provider="e2b", code="print(sum(range(10)))", api_base=base)
    assert once.stdout == "45\n", once


if __name__ == "__main__":
    asyncio.run(main())
