"""The imports of agent code are checked; those of an authorized library are not."""

from __future__ import annotations

import pytest

from executor_server.sessions import Session
from tests.contract.harness import Harness, pieces
from tests.contract.marks import promise

pytestmark = promise("rules-imports")


@pytest.mark.parametrize(
    ("imports", "code", "output"),
    [
        (("numpy",), "import numpy\nint(numpy.arange(9).sum())", 36),
        (("datetime",), "import datetime\ndatetime.datetime.strptime('2020', '%Y').year", 2020),
        (("time",), "import time\ntime.strptime('2020', '%Y').tm_year", 2020),
        (("PIL",), "from PIL import Image\nImage.new('RGB', (2, 3)).size", (2, 3)),
        (("os.path",), "import os\nimport os.path\nos.path.basename('a/b')", "b"),
        (("collections",), "from collections import namedtuple\ntuple(namedtuple('P', 'x y')(1, 2))", (1, 2)),
        (("dataclasses",), "import dataclasses\n@dataclasses.dataclass\nclass P:\n    x: int\nP(1).x", 1),
    ],
)
async def test_libraries_may_import_any_module(
    harness: Harness, imports: tuple[str, ...], code: str, output: object
) -> None:
    session = await harness.session(imports=imports)
    run = await harness.run(session, code)
    assert run.outcome == "succeeded", run.ended.error
    assert run.output == output


async def test_agent_code_imports_authorized_modules_only(harness: Harness) -> None:
    session = await harness.session(imports=("importlib", "numpy"))
    for code in (
        "import socket",
        "def f():\n    from socket import create_connection",
        "__import__('socket')",
        "__import__('socket', globals(), globals(), [], 0)",
        "imported = __import__\nimported('socket', globals(), globals(), [])",
        "exec('import socket')",
        "eval('__import__(\"socket\", globals(), globals(), [])')",
        "import importlib\nimportlib.import_module('socket')",
        "import numpy.random",
    ):
        run = await harness.run(session, code)
        assert run.outcome == "import_denied", (code, run.ended)
        assert "Authorized imports are: ['importlib', 'numpy']" in run.message
        assert run.state == "kept"


async def _with(harness: Harness, files: dict[str, str], profile: str = "", **options: object) -> Session:
    session = await harness.session_under(profile, **options)
    for path, text in files.items():
        await session.put_file(path, len(text), pieces(text.encode()))
    return session


COUNTER = "import math\ndef count(n):\n    return sum(math.floor(i) for i in range(n))\n"


async def test_modules_of_the_workspace_are_the_programs_own(harness: Harness) -> None:
    """They need no authorization; what they import does, and each loop in them counts."""
    files = {
        "counter.py": COUNTER,
        "pack/__init__.py": "from .part import x\n",
        "pack/part.py": "import socket\nx = 1\n",
    }
    session = await _with(harness, files, imports=("math",))
    run = await harness.run(session, "import counter\ncounter.count(500)")
    assert (run.output, run.ended.usage.operations > 500) == (124_750, True)
    run = await harness.run(session, "x = 1\nimport pack")
    assert (run.outcome, run.ended.error and run.ended.error.line) == ("import_denied", 2)
    assert "Import of socket is not allowed (/workspace/pack/part.py, line 1)" in run.message
    assert run.message.endswith("['math'] and modules of the workspace")
    run = await harness.run(session, "import counter\nwhile True: counter.count(9)", operations=10_000)
    assert run.outcome == "operation_limit"


async def test_a_policy_can_have_them_named(harness: Harness) -> None:
    files = {"counter.py": COUNTER, "pack/__init__.py": "from .part import x\n", "pack/part.py": "x = 1\n"}
    session = await _with(harness, files, "imports.workspace = false", imports=("math", "pack"))
    run = await harness.run(session, "import counter")
    assert (run.outcome, run.message) == (
        "import_denied",
        "Import of counter is not allowed. Authorized imports are: ['math', 'pack']",
    )
    assert (await harness.run(session, "import pack.part\npack.x")).output == 1


async def test_a_step_writes_a_module_that_a_later_one_imports_and_changes(harness: Harness) -> None:
    session = await harness.session(imports=("importlib", "pathlib"))
    await harness.run(session, "from pathlib import Path\nPath('made.py').write_text('value = 1')")
    assert (await harness.run(session, "import made\nmade.value")).output == 1
    for value in range(2, 6):  # all within a second, of the same length
        source = f"Path('made.py').write_text('value = {value}')\nimport importlib\nimportlib.reload(made).value"
        assert (await harness.run(session, source)).output == value
    run = await harness.run(session, "Path('broken.py').write_text('x = (')\nimport broken")
    assert (run.outcome, run.ended.error and run.ended.error.type) == ("exception", "SyntaxError")
    assert run.ended.error is not None
    assert "importlib" not in run.ended.error.traceback.partition("import broken")[2]


async def test_a_fork_keeps_the_programs_own_modules(harness: Harness) -> None:
    session = await _with(harness, {"counter.py": COUNTER}, imports=("math", "os"))
    source = (
        "import counter, os\npid = os.fork()\nif not pid:\n    os._exit(counter.count(3))\nos.waitpid(pid, 0)[1] >> 8"
    )
    assert (await harness.run(session, source)).output == 3


async def test_an_import_that_a_time_limit_cuts_short_can_be_repeated(harness: Harness) -> None:
    slow = "import pack.part, os, time\nif not os.path.exists('ready'):\n    time.sleep(30)\n"
    session = await _with(harness, {"pack/__init__.py": slow, "pack/part.py": "x = 1\n"}, imports=("os", "time"))
    assert (await harness.run(session, "import pack", wall_time_s=0.5)).outcome == "timeout"
    again = "import os\nos.mkdir('ready')\nimport pack\npack.part.x"
    run = await harness.run(session, again)
    assert run.output == 1, run.message
