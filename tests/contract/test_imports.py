"""The imports of agent code are checked; those of an authorized library are not."""

from __future__ import annotations

import pytest

from tests.contract.harness import Harness
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
