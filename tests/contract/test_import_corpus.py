"""The same programs get the same verdicts on every CPython: about their imports, and by the rules of the language."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from itertools import groupby

import pytest

from executor_server.sessions import Session
from tests.contract.harness import Harness, Transcript, pieces
from tests.contract.import_corpus import AUTHORIZED, DENIED, MODULES, OK, PROGRAMS, Program
from tests.contract.marks import promise
from tests.contract.wire import Front, harness_of
from tests.support.interpreters import TRIED
from tests.support.language_corpus import BASE, MORE_PYTHON, ORDINARY, REFUSED, Refused

pytestmark = promise("rules-same")


STRICT = 'language.preset = "strict"'
_REFUSAL = re.compile(r"Import of (.{1,200}?)…? is not allowed.*\. Authorized imports are: \['")


@pytest.fixture(params=TRIED)
async def harness(request: pytest.FixtureRequest, front: Front | None) -> AsyncIterator[Harness]:
    async with harness_of(request.param, front) as ready:
        yield ready


async def _session(harness: Harness, profile: str, imports: tuple[str, ...]) -> Session:
    session = await harness.session_under(profile, imports=imports)
    for path, text in MODULES.items():
        await session.put_file(path, len(text), pieces(text.encode()))
    return session


def _expected(program: Program) -> tuple[object, ...]:
    if program.verdict == OK:
        return "succeeded", "kept", 1, program.value
    return "import_denied", "kept", 1, program.verdict[:200], program.line


def _seen(run: Transcript) -> tuple[object, ...]:
    outcome, generation = run.outcome, run.ended.generation
    if run.ended.error is None:
        return outcome, run.state, generation, run.output
    refused = _REFUSAL.match(run.message)
    named = refused.group(1) if refused is not None else f"{run.ended.error.type}: {run.message[:300]}"
    return outcome, run.state, generation, named, run.ended.error.line


async def test_every_program_gets_its_verdict_in_one_session(harness: Harness) -> None:
    session = await _session(harness, "", AUTHORIZED)
    # The policy refuses who asks for what is denied; one that denies it later leaves the rest.
    await harness.change_policy(session, f"imports.denied = {list(DENIED)}")
    seen = {name: _seen(await harness.run(session, program.source)) for name, program in PROGRAMS.items()}
    expected = {name: _expected(program) for name, program in PROGRAMS.items()}
    assert {name: seen[name] for name in seen if seen[name] != expected[name]} == {}
    assert len(PROGRAMS) >= 80


def _runs_on(session: Session, source: str) -> bool:
    return "match " not in source or not session.python_version.startswith("3.9.")


async def test_every_rule_of_the_language_refuses_the_same_programs(harness: Harness) -> None:
    session = await _session(harness, STRICT, BASE)
    for imports, programs in groupby(sorted(REFUSED.items(), key=_imports_of), _imports_of):
        if not await harness.authorize(session, imports):
            await harness.end_sessions()
            session = await _session(harness, STRICT, imports)
        for name, program in programs:
            run = await harness.run(session, program.source)
            if _runs_on(session, program.source):
                assert (run.outcome, run.state) == ("policy_denied", "kept"), (name, run.ended)
                assert f"(language.{program.rule})" in run.message, name


def _imports_of(named: tuple[str, Refused]) -> tuple[str, ...]:
    return tuple(sorted({*BASE, *named[1].imports}))


async def test_what_strict_lets_pass_has_the_same_value(harness: Harness) -> None:
    session = await _session(harness, STRICT, BASE)
    for name, source in ORDINARY.items():
        assert (await harness.run(session, source)).outcome == "succeeded", name
    for name, (source, value) in MORE_PYTHON.items():
        run = await harness.run(session, source)
        if _runs_on(session, source):
            assert (run.outcome, run.output) == ("succeeded", value), (name, run.ended)
