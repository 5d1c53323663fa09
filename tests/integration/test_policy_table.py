"""Tenants with different profiles: each request gets exactly its verdict.

A refusal is explained by the line that a person would have to change; and with that line changed the request is granted.
A daemon is asked what it decides elsewhere than in `Policy.decide`: about code, executions, tools and files.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import types_pb2
from executor_client import ExecutorClient, InvalidRequest, Outcome, PolicyViolationError, Session
from executor_server.core.config.problems import undotted
from executor_server.core.errors import Violation, ViolationKind
from executor_server.core.import_patterns import is_denied
from executor_server.policy.decide import Policy
from executor_server.policy.explain.explanation import Explanation, PolicyText, Refusal, explain
from executor_server.policy.explain.question import Question
from executor_server.policy.file import parse_policy
from tests.integration.policy_table import CASES, CODE_OF_RULE, POLICY, Case
from tests.support.backends import require
from tests.support.daemon import running_daemon

TENANTS = ("far", "stranger", "support", "research")
SESSION_KEYS = ("image", "backend", "authorized_imports", "limits", "network", "packages")
MAX_CHANGES = 10


def violations_of(case: Case) -> list[tuple[str, ...]]:
    """The violations as the daemon lists them: rules of the tenant's profile by their whole path."""
    return [
        (*others, rule if rule in ("default", "server.backend") else f"profiles.{case.tenant}.{rule}")
        for *others, rule in case.violations
    ]


# ---------------------------------------------------------------------------------------------------------------------
# A daemon


@dataclass(frozen=True)
class Tenants:
    """One daemon and a client of each tenant."""

    clients: dict[str, ExecutorClient]
    sessions: dict[str, Session]  # for sessions without special requests

    @contextmanager
    def session(self, tenant: str, asked: dict[str, Any], *, own: bool) -> Iterator[Session]:
        if not asked and not own:
            yield self.sessions[tenant]
            return
        with self.clients[tenant].create_session(**asked) as session:
            yield session


@pytest.fixture(scope="module")
def tenants() -> Iterator[Tenants]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="p-"))
    image = sys.executable
    (directory / "policy.toml").write_text(POLICY)
    (directory / "executor.toml").write_text(
        f'[policy]\nfile = "{directory}/policy.toml"\n[pool]\nsize = 0\n'
        f'[local.images]\nbase = "{image}"\ndata = "{image}"\nweb = "{image}"\n'
    )
    with running_daemon(directory, "--config", str(directory / "executor.toml")) as daemon, ExitStack() as stack:
        clients = {name: stack.enter_context(daemon.client_of(name)) for name in TENANTS}
        sessions = {name: stack.enter_context(clients[name].create_session()) for name in ("research", "support")}
        yield Tenants(clients, sessions)
    shutil.rmtree(directory)


def do(tenants: Tenants, case: Case) -> Outcome:
    """Makes the requests of a case, and returns the outcome of its code. Raises the client's errors."""
    asked = dict(case.asked)
    of_session = {key: asked[key] for key in SESSION_KEYS if key in asked}
    if case.tenant not in tenants.sessions:
        tenants.clients[case.tenant].create_session(**of_session).close()
    with tenants.session(
        case.tenant, of_session, own=bool({"tools", "sandbox_tools", "put_file", "get_file"} & asked.keys())
    ) as session:
        if {"tools", "sandbox_tools"} & asked.keys():
            _register(session, asked.get("tools", ()), asked.get("sandbox_tools", ()))
        if "put_file" in asked:
            for number in range(asked["put_file"].get("so_far", 0)):
                session.put_file(f"file-{number}", b"x")
            session.put_file("file", b"x" * asked["put_file"]["size_bytes"])
        if "get_file" in asked:
            session.put_file("got", b"x" * asked["get_file"].get("size_bytes", 0))
            for _ in range(asked["get_file"].get("so_far", 0) + 1):
                session.get_file("got")
        code = [f"import {module}" for module in asked.get("imports", ())]
        code += [CODE_OF_RULE[rule] for rule in asked.get("language", ())]
        result = session.execute("\n".join(code) or "1 + 1", limits=asked.get("execution"))
        if result.outcome is Outcome.POLICY_DENIED:  # and it says by which rule
            assert result.error is not None
            assert f"language.{asked['language'][0]}" in result.error.message
        return result.outcome


def _register(session: Session, names: Sequence[str], names_in_sandbox: Sequence[str]) -> None:
    shipped = types_pb2.ShippedTool(source=types_pb2.ToolSource(text="def tool(): pass", entry="tool"))
    tools = [types_pb2.ToolSpec(name=name) for name in names]
    tools += [types_pb2.ToolSpec(name=name, shipped=shipped) for name in names_in_sandbox]
    session._transport.call(pb.RegisterToolsRequest(session_id=session.session_id, tools=tools))


BEYOND_DECIDE = {"execution", "tools", "sandbox_tools", "put_file", "get_file", "imports", "language"}
ASKED = [case for case in CASES if BEYOND_DECIDE & case.asked.keys() or case.name == "too much of everything"]


@pytest.mark.parametrize("case", ASKED, ids=[case.name for case in ASKED])
def test_each_request_gets_exactly_its_verdict(tenants: Tenants, case: Case) -> None:
    if case.violations:
        with pytest.raises(PolicyViolationError) as refused:
            do(tenants, case)
        found = [(each.field, each.kind, each.requested, each.allowed, each.rule) for each in refused.value.violations]
        assert (found, refused.value.omitted) == (violations_of(case), 0)
    elif case.invalid:
        with pytest.raises(InvalidRequest) as invalid:
            do(tenants, case)
        assert case.invalid in invalid.value.message
    else:
        assert do(tenants, case) is (case.outcome or Outcome.SUCCEEDED)


# ---------------------------------------------------------------------------------------------------------------------
# Explained


def explained(text: str, case: Case) -> Explanation:
    file = parse_policy(text.encode(), Path("policy.toml"))
    policy = Policy(file, images=["base", "data", "web"], backend="local", orphan_time_s=600.0)
    question = Question.model_validate(dict(case.asked))
    return explain(PolicyText(policy, text, '[server]\nbackend = "local"\n'), case.tenant, question)


def has_line(refusal: Refusal) -> bool:
    """True when a line could grant it: not for rules that can't be enforced, nor limits that the session itself set."""
    violation = refusal.violation
    assert violation is not None
    return violation.kind is not ViolationKind.UNSUPPORTED and "nothing in the policy" not in refusal.place.advice


def changed(text: str, refusal: Refusal) -> str:
    """The policy with the one statement changed, or added, that the refusal points to."""
    violation, line = refusal.violation, refusal.place.line
    assert violation is not None
    assert line is not None
    lines = text.splitlines()
    assert lines[line.number - 1].strip() == line.text
    rule = undotted(violation.rule)
    old = _value_in(text, refusal)
    written = refusal.place.free_place.write if refusal.place.free_place is not None else line.text.partition("=")[0]
    value = json.dumps(_granting(violation, old, written.strip().rpartition(".")[2]))
    if rule == ("default",):
        return "\n".join([*lines[: line.number - 1], f"default = {value}", *lines[line.number - 1 :]]) + "\n"
    if refusal.place.free_place is not None:
        assert refusal.place.free_place.kind == "below"
        return (
            "\n".join([*lines[: line.number], f"{refusal.place.free_place.write} = {value}", *lines[line.number :]])
            + "\n"
        )
    end = line.number
    while "]" not in lines[end - 1] and lines[end - 1].rstrip().endswith(("[", ",")):
        end += 1
    key = line.text.partition("=")[0]
    return "\n".join([*lines[: line.number - 1], f"{key}= {value}", *lines[end:]]) + "\n"


def _value_in(text: str, refusal: Refusal) -> Any:
    """The value that the policy has there now, inherited or not."""
    assert refusal.violation is not None
    _, *rule = undotted(refusal.violation.rule)
    if not rule:
        return None
    found: Any = parse_policy(text.encode(), Path("policy.toml")).profiles[str(rule[0])]
    for part in rule[1:]:
        found = getattr(found, str(part))
    return found


def _granting(violation: Violation, old: Any, written: str) -> Any:
    """A value that would grant the request; `written` is the last part of the key that has it."""
    if violation.field == "tenant":
        return "research"
    if violation.field == "language":
        return "standard" if written == "preset" else True
    if violation.kind is ViolationKind.DENIED:
        return [pattern for pattern in old if not is_denied(violation.requested, [pattern])]
    if isinstance(old, tuple):
        return [*old, violation.requested]
    return json.loads(violation.requested.replace(",", ""))


REFUSED = [case for case in CASES if case.violations or case.outcome in (Outcome.POLICY_DENIED, Outcome.IMPORT_DENIED)]


@pytest.mark.parametrize("case", REFUSED, ids=[case.name for case in REFUSED])
def test_each_refusal_is_explained_by_a_line_and_granted_when_it_is_changed(case: Case) -> None:
    text = POLICY
    explanation = explained(text, case)
    assert explanation.granted is None
    if case.violations:
        violations = [each.violation for each in explanation.refusals if each.violation is not None]
        found = [(each.field, each.kind.value, each.requested, each.allowed, each.rule) for each in violations]
        assert found == violations_of(case)
    hopeless = [refusal for refusal in explanation.refusals if not has_line(refusal)]
    for _ in range(MAX_CHANGES):
        mendable = [refusal for refusal in explained(text, case).refusals if has_line(refusal)]
        if not mendable:
            break
        text = changed(text, mendable[0])
    rest = explained(text, case)
    assert len(rest.refusals) == len(hopeless)
    assert (rest.granted is not None) is (not hopeless)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_what_is_not_refused_is_granted(case: Case) -> None:
    is_granted = explained(POLICY, case).granted is not None
    refused = case.violations or case.invalid or case in REFUSED
    assert is_granted is not bool(refused)
