"""The preset `guarded` refuses every import of a module that is not authorized, and nothing else, on every CPython."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from executor_server.sessions import Session
from tests.contract.harness import Harness, Transcript, load_library
from tests.contract.marks import promise
from tests.contract.wire import Front, harness_of
from tests.support.foreign_corpus import ATTACKS, HELPER, HONEST, LIBRARIES, SNIPPETS, authorized
from tests.support.interpreters import TRIED

pytestmark = promise("rules-same")

GUARDED = 'language.preset = "guarded"'
# A library may import for itself what the program may not; from then on the modules are loaded.
PREPARE = "import helper, importlib, runpy, inspect"


@dataclass
class Guarded:
    """A session under this preset, which may import what each program asks for."""

    harness: Harness
    imports: tuple[str, ...] | None = None
    made: Session | None = None
    there: dict[str, bool] = field(default_factory=dict)
    """Libraries, and if the image has them."""

    async def run(self, source: str, imports: tuple[str, ...]) -> Transcript:
        return await self.harness.run(await self.session(imports), source)

    async def session(self, imports: tuple[str, ...]) -> Session:
        wanted = (*authorized(imports), "prepare")
        if self.made is None or (imports != self.imports and not await self.harness.authorize(self.made, wanted)):
            await self.harness.end_sessions()
            self.made = await self._new_session(wanted)
        self.imports = imports
        return self.made

    async def _new_session(self, imports: tuple[str, ...]) -> Session:
        session = await self.harness.session_under(GUARDED, imports=imports)
        await load_library(session, "helper", HELPER)
        await load_library(session, "prepare", PREPARE)
        return session

    async def has(self, library: str) -> bool:
        if library not in self.there:
            self.there[library] = not (await self.run(f"import {library}", (library,))).message
        return self.there[library]


@pytest.fixture(params=[*TRIED, "libraries"])
async def guarded(request: pytest.FixtureRequest, front: Front | None) -> AsyncIterator[Guarded]:
    async with harness_of("" if request.param == "libraries" else request.param, front) as harness:
        yield Guarded(harness)


async def _runs_there(guarded: Guarded, source: str, imports: tuple[str, ...]) -> bool:
    if "match " in source and (await guarded.session(imports)).python_version.startswith("3.9."):
        return False
    return all([await guarded.has(library) for library in sorted(LIBRARIES & set(imports))])


async def test_every_access_to_a_module_that_is_not_authorized_is_refused(guarded: Guarded) -> None:
    refused, ran, passed = 0, [], {}
    for name, program in sorted({**SNIPPETS, **ATTACKS}.items(), key=lambda each: each[1].imports):
        if not await _runs_there(guarded, program.source, program.imports):
            continue
        ran.append(name)
        run = await guarded.run(program.source, program.imports)
        if run.outcome in ("policy_denied", "import_denied") and program.path in run.message and run.state == "kept":
            refused += 1
        else:
            passed[name] = (run.outcome, run.state, run.message[:300])
    assert not passed, "\n".join(f"{name}: {seen}" for name, seen in passed.items())
    assert (len(SNIPPETS), refused) == (72, len(ran))


async def test_nothing_else_is_refused(guarded: Guarded) -> None:
    wrong = {}
    for name, (source, imports, value) in sorted(HONEST.items(), key=lambda each: each[1][1]):
        if await _runs_there(guarded, source, imports):
            run = await guarded.run(source, imports)
            if (run.outcome, run.output) != ("succeeded", value):
                wrong[name] = (run.outcome, run.output, run.message[:300])
    assert not wrong, "\n".join(f"{name}: {seen}" for name, seen in wrong.items())
    everything = await guarded.harness.session_under(GUARDED)
    modules = "import random, sys\n(random._os is sys.modules['os'], type(sys.modules) is dict)"
    assert (await guarded.harness.run(everything, modules)).output == (True, True)
