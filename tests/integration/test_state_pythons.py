"""States on every CPython from 3.9 on, and from one version to another."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import cloudpickle
import pytest

from executor_server.backends.local import LocalBackend
from executor_server.core.config.backend_config import LocalImage
from executor_server.core.model import StateManifest
from executor_server.sessions import Session, SessionRequest
from executor_server.sessions.state_archive import StateArchives
from tests.contract.harness import PRINCIPAL, Harness, pieces
from tests.support.backends import require
from tests.support.interpreters import require_python
from tests.support.rounds import usual

PROGRAM = """
import decimal, datetime, collections
data = {'d': decimal.Decimal('1.5'), 't': datetime.date(2026, 1, 2), 'c': collections.Counter('aab'), 'b': bytearray(b'x')}
again = data['c']
class P:
    def __init__(self, n):
        self.n = n
    def more(self):
        return self.n + step
step = 2
p = P(1)
def outer(k):
    def inner():
        nonlocal k
        k += 1
        return k
    return inner
count = outer(5)
"""


@pytest.fixture(params=usual(["3.9", "3.10", "3.12", "3.13"], but=("3.10", "3.12", "3.13")))
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    """Sessions of the image "ours" and of "other", which is of another Python."""
    require("local")
    python = require_python(request.param)
    directory = Path(tempfile.mkdtemp(prefix="p-"))
    directory.chmod(0o755)
    pythons = {"ours": Path(sys.executable), "other": environment(directory, python)}
    images = {name: LocalImage(python=each) for name, each in pythons.items()}
    async with Harness(LocalBackend(directory / "state", images)) as ready:
        yield ready
    shutil.rmtree(directory)


def environment(directory: Path, python: Path) -> Path:
    """A virtual environment of this Python with our cloudpickle, which is of plain Python."""
    made = directory / f"env-{python.parent.parent.name}"
    subprocess.run([python, "-m", "venv", "--without-pip", made], check=True, timeout=60)
    (packages,) = made.glob("lib/python3.*/site-packages")
    shutil.copytree(Path(cloudpickle.__file__).parent, packages / "cloudpickle")
    return made


async def session_on(harness: Harness, image: str) -> Session:
    spec = harness.spec()
    spec = replace(spec, sandbox=replace(spec.sandbox, image=image))
    return await harness.manager.create(PRINCIPAL, SessionRequest(f"r{next(harness._names)}", spec))


async def test_a_state_goes_from_python_to_python(harness: Harness, tmp_path: Path) -> None:
    archives = StateArchives(tmp_path / "states", b"key")
    for begin, end in (("other", "other"), ("other", "ours"), ("ours", "other")):
        one = await session_on(harness, begin)
        ran = await harness.run(one, PROGRAM)
        assert ran.outcome == "succeeded", ran.message
        *data, manifest = [part async for part in one.export_state(archives)]
        assert isinstance(manifest, StateManifest) and not manifest.omitted_variables
        other = await session_on(harness, end)
        restored = await other.restore_state(
            archives, pieces(b"".join(part for part in data if isinstance(part, bytes)))
        )
        whole = await harness.run(
            other, "again is data['c'] and again['a'] == 2 and step == 2 and str(data['d']) == '1.5'"
        )
        assert whole.output is True, whole.message
        left_out = {each.name: each.reason for each in restored.omitted_variables}
        if begin == end:
            assert not left_out
            assert (await harness.run(other, "(p.more(), type(p) is P, count(), count())")).output == (3, True, 6, 7)
        else:
            assert set(left_out) == {"P", "p", "outer", "count"}, left_out
            assert "Python" in left_out["P"]
        for session in (one, other):
            await harness.manager.delete(PRINCIPAL, session.session_id)
