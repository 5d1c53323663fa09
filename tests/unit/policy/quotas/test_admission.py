"""Nothing happens in a session before its quota is reserved and its record is written."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor_server.core.errors import Reason, ResourceExhausted, Unavailable
from executor_server.core.fairness.fair_semaphore import FairSemaphore
from executor_server.core.lifecycle.admission import Answer, StateFacts
from executor_server.core.model import (
    AuditRules,
    BlobRef,
    ExecutionLimits,
    Outcome,
    Result,
    SandboxSpec,
    SessionFacts,
    ShippedTool,
    ToolCall,
    ToolSource,
    ToolSpec,
    Usage,
    VariablesState,
)
from executor_server.core.processes import ProcessFacts
from executor_server.policy.audit.log import AuditLog
from executor_server.policy.profile import QuotasTable
from executor_server.policy.quotas.controller import Admission
from executor_server.policy.quotas.quotas import Quotas
from tests.support.audit import PRINCIPAL, audit_log, facts, kinds, records
from tests.support.specs import session_spec

CODE = "print('é')"
LIMITS = ExecutionLimits(1.0, 1.0, 1000, 1000)
SPEC = session_spec(SandboxSpec("base", 2**28, 16, 2**24, 60.0), imports=("numpy",), prelude="x = 1")
CLOSED = replace(SPEC, audit=AuditRules(fail_closed=True))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "audit"


@pytest.fixture
async def log(directory: Path) -> AsyncIterator[AuditLog]:
    async with audit_log(directory, sync="always") as log:
        yield log


def make_admission(log: AuditLog | None, **quotas: int) -> Admission:
    return Admission(Quotas(lambda _tenant: QuotasTable.model_validate(quotas)), FairSemaphore(1), log)


@pytest.fixture
def admission(log: AuditLog) -> Admission:
    return make_admission(log)


async def test_what_is_granted_to_a_session_is_written_down_first(admission: Admission, directory: Path) -> None:
    await admission.session(PRINCIPAL, "r1", SPEC)
    (record,) = records(directory)
    wanted = {"kind": "session_requested", "tenant": "acme", "principal": "ci", "request": "r1", "image": "base"}
    assert wanted.items() <= record.items()
    assert record["imports"] == ["numpy"]
    assert record["limits"]["memory_bytes"] == SPEC.limits.memory_bytes
    assert record["prelude_sha256"] == hashlib.sha256(b"x = 1").hexdigest()


@pytest.mark.parametrize("code", ["none", "hash", "full"])
async def test_of_code_is_written_what_the_profile_says(admission: Admission, directory: Path, code: Any) -> None:
    await admission.execution(facts(code=code), "e1", CODE, LIMITS)
    (record,) = records(directory)
    digest = hashlib.sha256(CODE.encode()).hexdigest()
    assert (record["execution"], record["code_bytes"]) == ("e1", len(CODE.encode()))
    assert record.get("code_sha256") == (None if code == "none" else digest)
    assert record.get("code") == (CODE if code == "full" else None)
    assert record["limits"]["operations"] == 1000


@pytest.mark.parametrize("code", ["none", "hash", "full"])
async def test_of_tools_that_are_shipped_is_written_what_they_are_made_of(
    admission: Admission, directory: Path, code: Any
) -> None:
    as_source = ShippedTool(ToolSource("x = 1", "x", BlobRef("b", 10**6, sha256="ab")), modules=("json",))
    tools = [
        ToolSpec("asked", "", (), is_final_answer=True),
        ToolSpec("a", "", (), is_final_answer=False, shipped=as_source),
        ToolSpec("b", "", (), is_final_answer=False, shipped=ShippedTool(b"packed")),
        ToolSpec("c", "", (), is_final_answer=False, shipped=ShippedTool(BlobRef("c", 5))),
    ]
    await admission.tools(facts(code=code), tools)
    (record,) = records(directory)
    assert (record["count"], record["names"], record["shipped_count"]) == (4, ["asked", "a", "b", "c"], 3)
    digests: dict[str, dict[str, str | None]] = {
        "a": {"source_sha256": hashlib.sha256(b"x = 1").hexdigest(), "bindings_sha256": "ab"},
        "b": {"value_sha256": hashlib.sha256(b"packed").hexdigest()},
        "c": {"value_sha256": None},
    }
    sizes = {"a": {"source_bytes": 5, "bindings_bytes": 10**6}, "b": {"value_bytes": 6}, "c": {"value_bytes": 5}}
    assert record["shipped"] == [
        {"name": name, "placement": "sandbox", **sizes[name], **(digests[name] if code != "none" else {})}
        for name in "abc"
    ]


async def test_tools_variables_and_files_are_written_down_by_name_and_size(
    admission: Admission, directory: Path
) -> None:
    session = facts()
    await admission.tools(session, [ToolSpec("search", "finds", (), is_final_answer=False)])
    await admission.imports(session, ["os"])
    await admission.variables(session, ["x", "y"], write=True)
    await admission.variables(session, ["x"], write=False)
    await admission.file_put(session, "a.csv", 12, tar=False)
    await admission.file_get(session, "out", tar=True)
    admission.tool_call(session, "e1", ToolCall("c1", "search", b"12345"))
    admission.tool_call(session, "e1", ToolCall("c2", "search", BlobRef("b", 10**6)))
    await admission.tool_answer(session, "e1", Answer("c1", 7, failed=False))
    found = records(directory)
    assert kinds(directory) == [
        "tools_registered",
        "imports_authorized",
        "variables_set",
        "variables_read",
        "file_put",
        "file_requested",
        "tool_called",
        "tool_called",
        "tool_answered",
    ]
    assert [found[0]["names"], found[1]["names"], found[2]["names"]] == [["search"], ["os"], ["x", "y"]]
    assert [found[4]["bytes"], found[5]["archive"]] == [12, True]
    assert [found[6]["argument_bytes"], found[7]["argument_bytes"], found[8]["bytes"]] == [5, 10**6, 7]


async def test_states_are_written_down_by_digest_and_origin(admission: Admission, directory: Path) -> None:
    await admission.state_export(facts())
    await admission.state_restore(facts(), STATE)
    asked, restored = records(directory)
    assert (asked["kind"], restored["kind"]) == ("state_requested", "state_restored")
    state = {"state_sha256": "ab" * 32, "bytes": 100, "variables": 3, "files": 2, "foreign": True, "from_session": "s0"}
    assert state.items() <= restored.items()


async def test_a_quota_that_is_used_up_refuses_before_anything_is_written(log: AuditLog, directory: Path) -> None:
    admission = make_admission(log, sessions=1)
    await admission.session(PRINCIPAL, "r1", SPEC)
    with pytest.raises(ResourceExhausted):
        await admission.session(PRINCIPAL, "r2", SPEC)
    assert kinds(directory) == ["session_requested"]


STATE = StateFacts("ab" * 32, 100, 3, 2, is_foreign=True, from_session="s0")
SHIPPED = ToolSpec("b", "", (), is_final_answer=False, shipped=ShippedTool(b"packed"))
EFFECTS: dict[str, Callable[[Admission, SessionFacts], Awaitable[object]]] = {
    "execution": lambda admission, session: admission.execution(session, "e", CODE, LIMITS),
    "answer": lambda admission, session: admission.tool_answer(session, "e", Answer("c", 1, failed=False)),
    "tools": lambda admission, session: admission.tools(session, []),
    "variables": lambda admission, session: admission.variables(session, ["x"], write=False),
    "put": lambda admission, session: admission.file_put(session, "a", 1, tar=False),
    "get": lambda admission, session: admission.file_get(session, "a", tar=False),
    "export": lambda admission, session: admission.state_export(session),
    "restore": lambda admission, session: admission.state_restore(session, STATE),
}


@pytest.mark.parametrize("effect", EFFECTS)
async def test_nothing_happens_unrecorded_where_the_profile_is_fail_closed(
    admission: Admission, directory: Path, effect: str
) -> None:
    directory.rename(directory.with_name("hidden"))
    with pytest.raises(Unavailable) as refusal:
        await EFFECTS[effect](admission, facts(fail_closed=True))
    assert (refusal.value.reason, refusal.value.retry_after_s) == (Reason.AUDIT_UNAVAILABLE, 2.0)


@pytest.mark.parametrize("effect", EFFECTS)
async def test_everything_goes_on_where_the_profile_is_not(admission: Admission, directory: Path, effect: str) -> None:
    directory.rename(directory.with_name("hidden"))
    await EFFECTS[effect](admission, facts())


STARTS: dict[str, Callable[[Admission, SessionFacts], Awaitable[object]]] = {
    "execution": EFFECTS["execution"],
    "process": lambda admission, session: admission.process(session, ProcessFacts("p", ("true",), (), has_pty=False)),
    "prelude": lambda admission, _session: admission.session(PRINCIPAL, "r", SPEC),
    "shipped tool": lambda admission, session: admission.tools(session, [SHIPPED]),
    "pickled variable": lambda admission, session: admission.variables(session, ["x"], write=True),
    "repr of a variable": lambda admission, session: admission.variables(session, ["x"], write=False),
    "pickling": lambda admission, session: admission.state_export(session),
    "pickled state": EFFECTS["restore"],
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("quota", ["cpu_time_s_per_hour", "output_bytes_per_hour"])
async def test_nothing_starts_code_after_the_use_of_an_hour(
    log: AuditLog, directory: Path, start: str, quota: str
) -> None:
    quotas = Quotas(lambda _tenant: QuotasTable.model_validate({quota: 5}))
    usage = Usage(wall_time_s=1.0, cpu_time_s=5.0, output_bytes=5)
    quotas.execution_ended(facts(), "e", Result(Outcome.SUCCEEDED, VariablesState.KEPT, 1, usage), 1.0)
    admission = Admission(quotas, FairSemaphore(1), log)
    with pytest.raises(ResourceExhausted, match=quota):
        await STARTS[start](admission, facts())
    assert records(directory) == []


async def test_what_starts_no_code_goes_on_after_the_use_of_an_hour(log: AuditLog) -> None:
    quotas = Quotas(lambda _tenant: QuotasTable(cpu_time_s_per_hour=5))
    quotas.background_used(facts(), 5.0)
    admission = Admission(quotas, FairSemaphore(1), log)
    await admission.session(PRINCIPAL, "r", replace(SPEC, prelude=""))
    await admission.tools(facts(), [replace(SHIPPED, shipped=None)])
    await admission.file_get(facts(), "a", tar=False)


async def test_a_tool_is_not_called_unrecorded_where_the_profile_is_fail_closed(
    admission: Admission, directory: Path
) -> None:
    directory.rename(directory.with_name("hidden"))
    admission.tool_call(facts(), "e", ToolCall("c", "search", b""))
    with pytest.raises(Unavailable):
        admission.tool_call(facts(fail_closed=True), "e", ToolCall("c", "search", b""))


async def test_a_session_that_can_not_be_recorded_leaves_its_quota(log: AuditLog, directory: Path) -> None:
    admission = make_admission(log, sessions=1)
    hidden = directory.rename(directory.with_name("hidden"))
    with pytest.raises(Unavailable):
        await admission.session(PRINCIPAL, "r1", CLOSED)
    hidden.rename(directory)
    await admission.session(PRINCIPAL, "r1", SPEC)


async def test_without_a_log_only_what_need_not_be_recorded_is_done() -> None:
    admission = make_admission(None)
    await admission.session(PRINCIPAL, "r1", SPEC)
    with pytest.raises(Unavailable):
        await admission.session(PRINCIPAL, "r2", CLOSED)


async def test_sandboxes_are_made_in_turns(admission: Admission) -> None:
    async with admission.creation_turn("a"):
        pass
