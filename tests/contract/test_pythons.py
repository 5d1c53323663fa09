"""The guest runs on every CPython from 3.9 on, so any environment can be an image."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from executor_api.values import encode
from executor_server.core.errors import InvalidRequest, ModulesMissing
from executor_server.core.model import ShippedTool, ToolSource, ToolSpec
from executor_server.sessions import Session
from tests.contract.harness import Harness, get_variables, harness_on, set_variables
from tests.contract.marks import promise
from tests.contract.wire import Front, open_wire_harness
from tests.support.interpreters import TRIED, find_python, require_python


@asynccontextmanager
async def _opened(python: Path, image: str, front: Front | None) -> AsyncIterator[Harness]:
    if front is None:
        async with harness_on(python, image) as harness:
            yield harness
        return
    async with open_wire_harness(front) as wire:
        yield cast("Harness", wire)
        await wire.end_sessions()


@pytest.fixture(params=TRIED)
async def session(request: pytest.FixtureRequest, front: Front | None) -> AsyncIterator[Session]:
    image = f"py{request.param}"
    async with _opened(require_python(request.param), image, front) as harness:
        made = await harness.session(prelude="from math import sqrt", image=image)
        made.harness, made.image = harness, image  # type: ignore[attr-defined]
        assert made.python_version.startswith(f"{request.param}.")
        yield made


async def test_a_session_lives_on_this_python(session: Session) -> None:
    harness: Harness = session.harness  # type: ignore[attr-defined]

    await set_variables(session, x={"a": [1, (2.5, {"b"})], "big": bytes(100_000)})
    assert (await harness.run(session, "len(x['big']) + x['a'][0]")).output == 100_001
    failed = await harness.run(session, "def f():\n    return 1 / 0\nf()")
    assert failed.outcome == "exception" and "line 2, in f" in failed.ended.error.traceback  # type: ignore[union-attr]
    assert (await harness.run(session, "while True:\n    pass", operations=1000)).outcome == "operation_limit"
    assert (await harness.run(session, "import time\ntime.sleep(1e6)", wall_time_s=0.2)).state == "kept"
    assert (await harness.run(session, "import os\nos._exit(3)")).state == "reset"
    installing = await harness.run(session, "!pip install polars")
    assert installing.outcome == "exception" and installing.state == "kept"
    assert 'packages=["polars"]' in installing.ended.error.message  # type: ignore[union-attr]
    greeted = await harness.run(session, "import asyncio\nprint('ü')\nawait asyncio.sleep(0, sqrt(16))")
    assert (greeted.output, greeted.stdout) == (4.0, "ü\n")
    tools = await harness.run_with_tools(session, "tool(1) + 1", {"tool": lambda n: n * 2})
    assert tools.output == 3
    read, _ = await get_variables(session, "f")
    assert read == {}


async def test_libraries_that_an_image_lacks_are_reported_and_their_values_refused(session: Session) -> None:
    """A bare Python has no numpy: a text in the place of an array would be found out in the middle of a program."""
    harness: Harness = session.harness  # type: ignore[attr-defined]

    image: str = session.image  # type: ignore[attr-defined]
    made = await harness.session(image=image, imports=("numpy.*", "math", "json.decoder", "nowhere"))
    python = find_python(".".join(made.python_version.split(".")[:2]))
    assert python is not None
    if any(python.parents[1].glob("lib/python*/site-packages/numpy")):
        assert made.missing_modules == ("nowhere",)
        return
    assert sorted(made.missing_modules) == ["nowhere", "numpy"]
    await set_variables(session, a=1)
    with pytest.raises(InvalidRequest, match=r"variable b: .*this Python has no numpy.*Use an image that has numpy"):
        await set_variables(session, a=2, b=np.zeros(3))
    assert (await harness.run(session, "a")).output == 1, "all or none"
    run = await harness.run_with_tools(
        session, "try:\n    t()\nexcept ValueError as e:\n    r = str(e)\nr", {"t": lambda: np.zeros(3)}
    )
    assert "this Python has no numpy" in run.output


pytestmark = promise("python-any")

TOOL = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Optional
import pickle

@dataclass
class Point:
    x: Optional[int | str] = None

def tool(n):
    point = pickle.loads(pickle.dumps(Point(n)))
    return point.x + offset, len([asked]), [type(each).__name__ for each in (point, tool)]
"""


async def test_a_tool_runs_in_the_sandbox_on_this_python(session: Session) -> None:
    harness: Harness = session.harness  # type: ignore[attr-defined]

    shipped = ShippedTool(ToolSource(TOOL, "tool", encode({"offset": 40})), modules=("json", "xml.dom"))
    await session.register_tools([ToolSpec("add", "", (), False, shipped), ToolSpec("asked", "", (), False)])
    assert (await harness.run(session, "add(2)")).output == (42, 1, ["Point", "function"])
    failed = await harness.run(session, "add('2')")
    assert failed.ended.error is not None and 'File "<tool-add>", line 13, in tool' in failed.ended.error.traceback
    with pytest.raises(ModulesMissing) as refusal:
        await session.register_tools([ToolSpec("add", "", (), False, ShippedTool(b"", ("nowhere", "json.nothing")))])
    assert refusal.value.modules == ("nowhere", "json.nothing")
    assert (await harness.run(session, "import os\nos._exit(3)")).state == "reset"
    assert (await harness.run(session, "add(2)[0]")).output == 42
