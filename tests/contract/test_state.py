"""The state of a session is exported in one sandbox and restored in another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from executor_server.core.errors import InvalidRequest, PreconditionFailed, Reason, ResourceExhausted
from executor_server.core.model import StateManifest
from executor_server.sessions import Session
from executor_server.sessions.state_archive import MAX_OF_TENANT, StateArchives
from tests.contract.harness import MIB, Harness, follow, open_harness, pieces
from tests.contract.marks import promise
from tests.support.backends import require
from tests.support.polling import eventually_async


@pytest.fixture
def archives(tmp_path: Path) -> Iterator[StateArchives]:
    yield StateArchives(tmp_path / "states", b"a key of these tests")
    assert not list((tmp_path / "states").iterdir())


async def exported(session: Session, archives: StateArchives) -> tuple[bytes, StateManifest]:
    parts = [part async for part in session.export_state(archives)]
    *data, manifest = parts
    assert isinstance(manifest, StateManifest)
    return b"".join(part for part in data if isinstance(part, bytes)), manifest


def omitted(manifest: StateManifest) -> dict[str, str]:
    return {each.name: each.reason for each in (*manifest.omitted_variables, *manifest.omitted_files)}


@promise("state-export")
async def test_a_session_goes_on_in_another_sandbox(harness: Harness, archives: StateArchives) -> None:
    one = await harness.session()
    program = (
        "import numpy as np, dataclasses\nx = np.arange(10)\ny = {'x': x}\n@dataclasses.dataclass\nclass P:\n    n: int\n"
        "    def more(self):\n        return P(self.n + k)\nk = 5\np = P(1)\nopen('f.txt', 'w').write('text')"
    )
    assert (await harness.run(one, program)).outcome == "succeeded"
    archive, manifest = await exported(one, archives)
    assert not omitted(manifest) and (manifest.files, manifest.file_bytes) == (1, 4)
    other = await harness.session()
    restored = await other.restore_state(archives, pieces(archive))
    assert restored.variables == manifest.variables and not omitted(restored)
    run = await harness.run(other, "k = 6\nx[0] = 7\n(int(y['x'][0]), p.more().n, type(p) is P, open('f.txt').read())")
    assert run.output == (7, 7, True, "text")
    # The first session is unchanged.
    assert (await harness.run(one, "int(x[0]), k, p.n")).output == (0, 5, 1)
    assert one.generation == other.generation == 1


@promise("state-export")
@pytest.mark.parametrize("source", ["from local", "from docker"])
async def test_a_state_of_one_backend_goes_on_computing_in_another(
    harness: Harness, archives: StateArchives, source: str
) -> None:
    backend = source.removeprefix("from ")
    require(backend)
    async with open_harness(backend) as origin:
        one = await origin.session()
        program = "def more():\n    global x\n    x += 1\n    return x\nx = 40\nmore()\nopen('f', 'w').write('text')"
        assert (await origin.run(one, program)).outcome == "succeeded"
        archive, manifest = await exported(one, archives)
        assert not omitted(manifest)
    session = await harness.session()
    assert not omitted(await session.restore_state(archives, pieces(archive)))
    assert (await harness.run(session, "more(), open('f').read()")).output == (42, "text")


@promise("state-export")
async def test_an_export_waits_for_the_running_execution_and_changes_nothing(
    harness: Harness, archives: StateArchives
) -> None:
    session = await harness.session()
    execution = await harness.begin(session, "import time\ntime.sleep(0.3)\nlate = 1")
    archive, manifest = await exported(session, archives)
    assert "late" in manifest.variables
    assert (await follow(execution)).outcome == "succeeded"
    assert archive


@promise("state-export")
async def test_an_export_that_waits_takes_no_place_of_the_tenant(harness: Harness, archives: StateArchives) -> None:
    """A tenant's places are few; a session that waits for its own program must not take one from others."""
    session, other = await harness.session(), await harness.session()
    execution = await harness.begin(session, "import os\nwhile not os.path.exists('go'): pass\ndel os")
    waiting = [asyncio.create_task(exported(session, archives)) for _ in range(MAX_OF_TENANT + 1)]
    assert (await exported(other, archives))[1].variables == ()
    waiting.pop().cancel()
    await session.put_file("go", 0, pieces(b""))
    assert (await follow(execution)).outcome == "succeeded"
    assert all(archive for archive, _ in await asyncio.gather(*waiting))
    with archives.spool("tenant", 1), archives.spool("tenant", 1):
        pass


@promise("state-hostile")
@pytest.mark.parametrize(
    "body",
    [
        "import os; os._exit(1)",
        "while True: pass",
    ],
)
async def test_a_hostile_reduce_costs_its_variable_and_not_the_session(
    harness: Harness, archives: StateArchives, body: str
) -> None:
    session = await harness.session()
    await harness.run(
        session, f"class C:\n    def __reduce__(self):\n        {body}\nkept = [1]\nc = C()\nafter = kept"
    )
    archive, manifest = await exported(session, archives)
    assert list(omitted(manifest)) == ["c"]
    assert (await harness.run(session, "kept.append(2); after")).output == [1, 2]
    other = await harness.session()
    await other.restore_state(archives, pieces(archive))
    assert (await harness.run(other, "after is kept")).output is True


@promise("state-hostile")
async def test_a_variable_that_memory_has_no_room_for_is_left_out(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session(memory_bytes=768 * MIB)
    assert (await harness.run(session, "big = bytes(300_000_000)\nsmall = 1")).outcome == "succeeded"
    _, manifest = await exported(session, archives)
    assert list(omitted(manifest)) == ["big"] and manifest.variables == ("small",)
    assert (await harness.run(session, "len(big)")).output == 300_000_000


@promise("state-hostile")
async def test_a_session_that_cannot_fork_gets_an_error_and_goes_on(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session(processes=8)
    await harness.run(session, "import threading\ngo = threading.Event()\nts = []")
    await harness.run(
        session,
        "try:\n    while True:\n        t = threading.Thread(target=go.wait, daemon=True); t.start(); ts.append(t)\nexcept RuntimeError:\n    pass",
    )
    try:
        _, manifest = await exported(session, archives)
    except InvalidRequest as refused:
        assert refused.reason is Reason.STATE_REFUSED and "process" in refused.message
    else:
        assert "go" in omitted(manifest)
    assert (await harness.run(session, "go.set(); len(ts) > 0")).output is True


@promise("state-export")
async def test_files_that_cannot_be_exported_are_named(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import os\nos.symlink('/etc/passwd', 'l')\nos.mkfifo('p')\nos.makedirs('d/e')\nopen('d/e/f', 'w').write('x')\ndel os",
    )
    archive, manifest = await exported(session, archives)
    assert omitted(manifest) == {"l": "a symbolic link", "p": "a FIFO"} and manifest.files == 1
    other = await harness.session()
    await other.restore_state(archives, pieces(archive))
    assert (await harness.run(other, "import os\nsorted(os.listdir('.')), open('d/e/f').read()")).output == (["d"], "x")


@promise("state-export")
async def test_files_that_have_no_room_in_the_new_sandbox_are_refused(
    harness: Harness, archives: StateArchives
) -> None:
    session = await harness.session()
    await harness.run(session, "f = open('big', 'wb'); f.write(bytes(20_000_000)); f.close(); del f")
    archive, _ = await exported(session, archives)
    small = await harness.session(disk_bytes=8 * MIB)
    with pytest.raises(ResourceExhausted):
        await small.restore_state(archives, pieces(archive))


@promise("state-export")
async def test_a_session_that_has_run_something_is_not_restored_into(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.run(session, "a = 1")
    archive, _ = await exported(session, archives)
    with pytest.raises(PreconditionFailed) as refused:
        await session.restore_state(archives, pieces(archive))
    assert refused.value.reason is Reason.SESSION_USED


@promise("state-export")
async def test_the_same_state_again_is_the_same_answer_and_another_is_refused(
    harness: Harness, archives: StateArchives
) -> None:
    session = await harness.session()
    await harness.run(session, "a = [1]")
    first, _ = await exported(session, archives)
    await harness.run(session, "a = [2]")
    second, _ = await exported(session, archives)
    other = await harness.session()
    answers = await asyncio.gather(*(other.restore_state(archives, pieces(first)) for _ in range(2)))
    assert answers[0] == answers[1]
    assert (await harness.run(other, "a.append(3); a")).output == [1, 3]
    assert await other.restore_state(archives, pieces(first)) == answers[0]
    with pytest.raises(PreconditionFailed):
        await other.restore_state(archives, pieces(second))
    assert (await harness.run(other, "a")).output == [1, 3]


@promise("state-hostile")
async def test_restoring_that_ends_the_interpreter_is_refused(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import os\nclass C:\n    def __init__(self):\n        self.a = 1\n    def __setstate__(self, s):\n        os._exit(1)\nc = C()",
    )
    archive, _ = await exported(session, archives)
    other = await harness.session()
    with pytest.raises(InvalidRequest) as refused:
        await other.restore_state(archives, pieces(archive))
    assert refused.value.reason is Reason.STATE_REFUSED
    assert (await harness.run(other, "1")).state == "reset"


@promise("state-hostile")
async def test_a_restored_state_obeys_the_rules_of_its_new_session(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.run(
        session,
        "import os, math\nrun = os.system\ndef f():\n    import subprocess\n    return subprocess\na = 1\ndef g():\n    while True:\n        pass",
    )
    archive, _ = await exported(session, archives)
    strict = await harness.session(imports=("math",))
    restored = await strict.restore_state(archives, pieces(archive))
    assert set(omitted(restored)) == {"os", "run"}
    assert (await harness.run(strict, "f()")).outcome == "import_denied"
    assert (await harness.run(strict, "g()", operations=10_000)).outcome == "operation_limit"


@promise("state-export")
async def test_a_restored_session_loses_its_variables_like_any_other(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.run(session, "a = 1")
    archive, _ = await exported(session, archives)
    other = await harness.session()
    await other.restore_state(archives, pieces(archive))
    await harness.run(other, "import os\nos._exit(1)")
    ended = await harness.run(other, "a")
    assert ended.outcome == "exception" and other.generation == 2


@promise("state-export")
async def test_a_session_that_is_lost_has_no_state(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.kill_sandbox(session)
    assert await eventually_async(lambda: session.state == "lost")
    with pytest.raises(PreconditionFailed) as refused:
        await exported(session, archives)
    assert refused.value.reason is Reason.SESSION_LOST


@promise("state-export")
async def test_a_client_that_leaves_in_the_middle_leaves_nothing(harness: Harness, archives: StateArchives) -> None:
    session = await harness.session()
    await harness.run(session, "a = bytes(5_000_000)")
    parts: AsyncIterator[bytes | StateManifest] = session.export_state(archives)
    await anext(parts)
    await parts.aclose()  # type: ignore[attr-defined]
    _, manifest = await exported(session, archives)
    assert manifest.variables == ("a",)
