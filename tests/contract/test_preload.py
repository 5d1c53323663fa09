"""Modules that the image names are imported before a program needs them, and cost it nothing, even when they fail."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from executor_server.config.backend_config import LocalImage
from executor_server.policy.decide import WarmSandboxes
from tests.contract.harness import Harness
from tests.contract.marks import promise
from tests.support.backends import require
from tests.support.forked_backend import local_backend
from tests.support.polling import eventually_async

pytestmark = promise("preload")


# Modules of the environment that the tests make. `good` comes last: its effect shows that the others have ended.
MODULES = {
    "good": "import _decimal\nvalue = 1",
    "raises": "raise ValueError('no')",
    "exits": "import sys\nsys.exit(3)",
    "dies": "import os\nos._exit(3)",
    "forks": "import os\nif os.fork() == 0:\n    raise SystemExit",
    "prints": "import ctypes, os, sys\nprint('a')\nsys.__stdout__.write('b')\nsys.stderr.write('c')\n"
    "os.write(1, b'd')\nctypes.CDLL(None).puts(b'e')\nsys.stdout = None",
    "spins": "import time\nwhile time.process_time() < 1:\n    pass\nimport _decimal",
    "hangs": "while True:\n    pass",
}


@pytest.fixture(scope="module")
def environment() -> Iterator[Path]:
    """A virtual environment with these modules."""
    directory = Path(tempfile.mkdtemp(prefix="c-env-"))
    directory.chmod(0o755)
    packages = directory / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages.mkdir(parents=True)
    (directory / "bin").mkdir()
    base = Path(os.path.realpath(sys.executable))
    (directory / "bin/python").symlink_to(base)
    (directory / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    for name, source in MODULES.items():
        (packages / f"{name}.py").write_text(source)
    yield directory / "bin/python"
    shutil.rmtree(directory)


@asynccontextmanager
async def opened(python: Path, *modules: str) -> AsyncIterator[Harness]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="c-"))
    directory.chmod(0o755)
    try:
        async with Harness(local_backend(directory, {"base": LocalImage(python=python, preload=modules)})) as harness:
            yield harness
    finally:
        shutil.rmtree(directory)


async def imported(library: str, processes: int = 2) -> None:
    """Waits until the interpreter has this library, and is ready. A sandbox without a session has no checker."""

    def done() -> bool:
        child_processes = interpreters()
        return len(child_processes) == processes and any(library in maps(process) for process in child_processes)

    assert await eventually_async(done)


def interpreters() -> list[psutil.Process]:
    """Returns the processes that were forked in the only sandbox: interpreter, checker and warm interpreter."""
    (monitor,) = [child for child in psutil.Process().children() if child.name() == "bwrap"]
    (supervisor,) = monitor.children()
    return list(supervisor.children())


def maps(process: psutil.Process) -> str:
    try:
        return Path(f"/proc/{process.pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


LOADED = "import sys\nprint('numpy' in sys.modules)\nimport numpy\nint(numpy.arange(9).sum())"


async def test_a_kept_sandbox_has_imported_the_modules_before_its_session_does() -> None:
    async with opened(Path(sys.executable), "numpy") as harness:
        harness.pool.keep_ready([WarmSandboxes(harness.spec().sandbox, 1)])
        await harness.pool.full()
        await imported("_multiarray_umath", processes=1)
        session = await harness.session()
        run = await harness.run(session, LOADED)
        assert session.warm
        assert (run.stdout, run.output) == ("True\n", 36)


async def test_without_it_a_module_is_not_imported_ahead(harness: Harness) -> None:
    run = await harness.run(await harness.session(), LOADED)
    assert (run.stdout, run.output) == ("False\n", 36)


async def test_modules_that_fail_die_or_print_cost_the_session_nothing(environment: Path) -> None:
    modules = ("missing", "raises", "exits", "dies", "forks", "prints", "good")
    async with opened(environment, *modules) as harness:
        session = await harness.session()
        await imported("_decimal")
        run = await harness.run(session, f"import sys\n[name for name in {modules} if name in sys.modules]")
        assert (run.output, run.stdout, run.stderr) == (["forks", "prints", "good"], "", "")
        assert (run.state, run.ended.generation) == ("kept", 1)


async def test_a_session_that_comes_while_a_module_is_imported_does_not_wait(environment: Path) -> None:
    async with opened(environment, "hangs") as harness:
        session = await harness.session()
        assert await eventually_async(
            lambda: len(child_processes := interpreters()) == 3 and child_processes[-1].cpu_times().user > 0.2
        )
        run = await harness.run(session, "import sys\n'hangs' in sys.modules", cpu_time_s=0.2)
        assert (run.outcome, run.output, run.ended.generation) == ("succeeded", False, 1)
        assert run.ended.usage.cpu_time_s < 0.2
        assert len(interpreters()) == 2


@pytest.mark.parametrize(
    "code",
    [
        "import good",
        "from good import value",
        "__import__('good')",
        "import importlib\nimportlib.import_module('good')",
        "exec('import good')",
    ],
)
async def test_importing_a_module_ahead_does_not_authorize_it(environment: Path, code: str) -> None:
    async with opened(environment, "good") as harness:
        session = await harness.session(imports=("importlib",))
        await imported("_decimal")
        assert (await harness.run(session, code)).outcome == "import_denied"


async def test_a_new_interpreter_imports_ahead_again_and_then_runs_the_prelude(environment: Path) -> None:
    async with opened(environment, "good") as harness:
        session = await harness.session(prelude="import sys\nseen = 'good' in sys.modules")
        assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
        await imported("_decimal")
        run = await harness.run(session, "seen, 'good' in sys.modules")
        assert (run.output, run.ended.generation) == ((True, True), 2)


async def test_a_new_interpreter_that_is_needed_at_once_runs_the_prelude_without(environment: Path) -> None:
    async with opened(environment, "hangs") as harness:
        session = await harness.session(prelude="here = 1")
        assert (await harness.run(session, "import os\nos._exit(1)")).state == "reset"
        assert (await harness.run(session, "here")).output == 1


async def test_tools_and_imports_of_a_session_reach_the_interpreter_that_imported_ahead(environment: Path) -> None:
    async with opened(environment, "good") as harness:
        session = await harness.session(imports=("good",))
        await imported("_decimal")
        code = "import good\ntool(good.value)"
        assert (await harness.run_with_tools(session, code, {"tool": lambda n: n + 1})).output == 2


async def test_a_session_is_not_charged_for_imports_ahead_while_it_asks_for_its_modules(
    environment: Path,
) -> None:
    async with opened(environment, "spins") as harness:
        session = await harness.session(imports=("sys", "spins", "missing"))
        assert session.missing_modules == ("missing",)
        await imported("_decimal")
        run = await harness.run(session, "import sys\n'spins' in sys.modules")
        assert (run.output, run.ended.generation) == (True, 1)
        session._channel.ping()
        await harness.run(session, "1")  # its answer has come by then
        spent_s = run.ended.usage.cpu_time_s + (session._background._highest_s or 0.0)
        assert spent_s < 0.5, "less than the import took"
