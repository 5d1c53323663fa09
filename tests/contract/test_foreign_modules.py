"""The preset `guarded` refuses every import of a module that is not authorized, and nothing else, on every CPython."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from executor_server.sessions import Session, SessionRequest
from tests.contract.harness import PRINCIPAL, Harness, Transcript, harness_on, pieces
from tests.contract.marks import promise
from tests.support.foreign_corpus import ATTACKS, HELPER, HONEST, LIBRARIES, SNIPPETS, authorized
from tests.support.interpreters import require_python

pytestmark = promise("rules-same")

GUARDED = ("foreign_modules",)


@pytest.fixture(params=["3.9", "3.10", "3.11", "3.12", "3.13", "libraries"])
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    async with harness_on(
        Path(sys.executable) if request.param == "libraries" else require_python(request.param)
    ) as ready:
        yield ready


async def _session(harness: Harness) -> Session:
    session = await harness.manager.create(PRINCIPAL, SessionRequest("request", harness.spec(imports=("*",))))
    await session.put_file("helper.py", len(HELPER), pieces(HELPER.encode()))
    await harness.run(session, "import helper, importlib, runpy, inspect; del helper, importlib, runpy, inspect")
    return session


async def _run(harness: Harness, session: Session, source: str, imports: tuple[str, ...]) -> Transcript:
    await session.requests.restrict(
        replace(session.spec, authorized_imports=authorized(imports), refused_language=GUARDED)
    )
    return await harness.run(session, source)


async def _runs_there(harness: Harness, session: Session, source: str, imports: tuple[str, ...]) -> bool:
    if "match " in source and session.python_version.startswith("3.9."):
        return False
    for library in LIBRARIES & set(imports):
        if (await _run(harness, session, f"import {library}", (library,))).message:
            return False
    return True


async def test_every_access_to_a_module_that_is_not_authorized_is_refused(harness: Harness) -> None:
    session = await _session(harness)
    refused, ran, passed = 0, [], {}
    for name, program in {**SNIPPETS, **ATTACKS}.items():
        if not await _runs_there(harness, session, program.source, program.imports):
            continue
        ran.append(name)
        run = await _run(harness, session, program.source, program.imports)
        if run.outcome in ("policy_denied", "import_denied") and program.path in run.message and run.state == "kept":
            refused += 1
        else:
            passed[name] = (run.outcome, run.state, run.message[:300])
    assert not passed, "\n".join(f"{name}: {seen}" for name, seen in passed.items())
    assert (len(SNIPPETS), refused) == (72, len(ran))


async def test_nothing_else_is_refused(harness: Harness) -> None:
    session = await _session(harness)
    wrong = {}
    for name, (source, imports, value) in HONEST.items():
        if await _runs_there(harness, session, source, imports):
            run = await _run(harness, session, source, imports)
            if (run.outcome, run.output) != ("succeeded", value):
                wrong[name] = (run.outcome, run.output, run.message[:300])
    assert not wrong, "\n".join(f"{name}: {seen}" for name, seen in wrong.items())


async def test_where_everything_is_authorized_nothing_is_refused(harness: Harness) -> None:
    session = await _session(harness)
    await session.requests.restrict(replace(session.spec, authorized_imports=("*",), refused_language=GUARDED))
    run = await harness.run(session, "import random, sys\n(random._os is sys.modules['os'], type(sys.modules) is dict)")
    assert run.output == (True, True)
