"""Modules that the image names are imported before a program needs them, and cost it nothing, even when they fail."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import psutil
import pytest

from executor_server.policy.decide import WarmSandboxes
from tests.contract.ahead import HARMFUL, ahead, has_imported, imported
from tests.contract.harness import MIB, Harness
from tests.contract.marks import promise
from tests.contract.wire import Front
from tests.support.polling import eventually_async, is_full

pytestmark = promise("preload")

Opened = Callable[[str], AbstractAsyncContextManager[Harness]]


@pytest.fixture
def opened(python_with_modules: Path, front: Front | None) -> Opened:
    """Opens a harness whose sessions have an image of `AHEAD`."""
    return lambda image: ahead(image, python_with_modules, front)


LOADED = "import sys\nprint('numpy' in sys.modules)\nimport numpy\nint(numpy.arange(9).sum())"


async def test_a_kept_sandbox_has_imported_the_modules_before_its_session_does(python_with_modules: Path) -> None:
    async with ahead("ahead-numpy", python_with_modules, None) as harness:
        harness.pool.keep_ready([WarmSandboxes(harness.spec().sandbox, 1)])
        assert await is_full(harness.pool)
        (monitor,) = [child for child in psutil.Process().children() if child.name() == "bwrap"]
        (supervisor,) = monitor.children()
        assert await eventually_async(lambda: has_imported(supervisor.children(), "_multiarray_umath"))
        session = await harness.session()
        run = await harness.run(session, LOADED)
        assert session.warm
        assert (run.stdout, run.output) == ("True\n", 36)


async def test_without_it_a_module_is_not_imported_ahead(harness: Harness) -> None:
    """In a sandbox that is too small to come from a template process with libraries, where that is how sandboxes are made."""
    run = await harness.run(await harness.session(memory_bytes=256 * MIB), LOADED)
    assert (run.stdout, run.output) == ("False\n", 36), run.message


async def test_modules_that_fail_die_or_print_cost_the_session_nothing(opened: Opened) -> None:
    async with opened("ahead-harmful") as harness:
        session = await harness.session()
        await imported(harness, session, "_decimal")
        run = await harness.run(session, f"import sys\n[name for name in {HARMFUL} if name in sys.modules]")
        assert (run.output, run.stdout, run.stderr) == (["forks", "prints", "good"], "", "")
        assert (run.state, run.ended.generation) == ("kept", 1)


async def test_a_session_that_comes_while_a_module_is_imported_does_not_wait(opened: Opened) -> None:
    async with opened("ahead-hangs") as harness:
        session = await harness.session()
        assert await eventually_async(lambda: any(each.cpu_times().user > 0.5 for each in harness.processes(session)))
        run = await harness.run(session, "import sys\n'hangs' in sys.modules", cpu_time_s=0.2)
        assert (run.outcome, run.output, run.ended.generation) == ("succeeded", False, 1)
        assert run.ended.usage.cpu_time_s < 0.2
        assert len(harness.processes(session)) == 2


async def test_importing_a_module_ahead_does_not_authorize_it(opened: Opened) -> None:
    async with opened("ahead-good") as harness:
        session = await harness.session(imports=("importlib",))
        await imported(harness, session, "_decimal")
        for code in ("import good", "__import__('good')", "import importlib\nimportlib.import_module('good')"):
            assert (await harness.run(session, code)).outcome == "import_denied", code


async def test_a_new_interpreter_imports_ahead_again_and_then_runs_the_prelude(opened: Opened) -> None:
    async with opened("ahead-good") as harness:
        session = await harness.session(prelude="import sys\nseen = 'good' in sys.modules")
        assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
        await imported(harness, session, "_decimal")
        run = await harness.run(session, "seen, 'good' in sys.modules")
        assert (run.output, run.ended.generation) == ((True, True), 2)


async def test_a_new_interpreter_that_is_needed_at_once_runs_the_prelude_without(opened: Opened) -> None:
    async with opened("ahead-hangs") as harness:
        session = await harness.session(prelude="here = 1")
        assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
        assert (await harness.run(session, "here")).output == 1


async def test_tools_and_imports_of_a_session_reach_the_interpreter_that_imported_ahead(opened: Opened) -> None:
    async with opened("ahead-good") as harness:
        session = await harness.session(imports=("good",))
        await imported(harness, session, "_decimal")
        code = "import good\ntool(good.value)"
        assert (await harness.run_with_tools(session, code, {"tool": lambda n: n + 1})).output == 2


async def test_a_session_is_not_charged_for_imports_ahead_while_it_asks_for_its_modules(
    opened: Opened,
) -> None:
    async with opened("ahead-spins") as harness:
        # Under a policy of its own, so of a tenant of its own behind a front.
        session = await harness.session_under("imports.default = []", imports=("sys", "spins", "missing"))
        assert session.missing_modules == ("missing",)
        await imported(harness, session, "_decimal")
        run = await harness.run(session, "import sys\n'spins' in sys.modules")
        assert (run.output, run.ended.generation) == (True, 1)
        spent_s = await harness.spent_cpu_s(session, run)
        assert spent_s < 0.5, "less than the import took"
