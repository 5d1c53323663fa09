"""Answers a question to a policy: would it grant this session, and these requests in it?

The decisions are those of `Policy.decide` and session_rules.py. This module decides only what they don't see: the rules
that a guest checks when code runs, and the quotas, which depend on what a tenant has used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

from executor_server.core import (
    LANGUAGE_RULES,
    ExecutorError,
    PolicyViolation,
    Principal,
    SessionSpec,
    ShippedTool,
    ToolSpec,
    Violation,
    ViolationKind,
    is_covered,
    is_denied,
    is_pattern,
)
from executor_server.core.config import ConfigError, Form, ReadForm, Section, validated
from executor_server.guest.egress.host_names import Target, parse_authority
from executor_server.policy.approvals import ApprovalKind, ApprovalRequired, Wanted
from executor_server.policy.decide import Policy
from executor_server.policy.hosts import pattern_of
from executor_server.policy.profile import QuotasTable
from executor_server.policy.requested import RequestedLimits, RequestedSession
from executor_server.policy.session_rules import (
    check_file_get,
    check_file_put,
    check_tools,
    execution_limits,
    tool_to_ask,
)
from executor_server.policy.violations import above_ceiling, denied_import, listed, not_allowed, rule_of, shortened

Number = int | float
ModuleName = Annotated[
    str, AfterValidator(Form("a dotted module name", lambda text: "*" not in text and is_pattern(text)))
]
ToolName = Annotated[str, AfterValidator(Form("the name of a tool", str.isidentifier))]
HostAndPort = Annotated[
    str, AfterValidator(ReadForm('a host and a port, as "pypi.org:443"', lambda text: str(parse_authority(text))))
]
LanguageRule = Annotated[str, AfterValidator(Form(f"one of {', '.join(LANGUAGE_RULES)}", LANGUAGE_RULES.__contains__))]
MAX_NAMES = 1024


class TransferAsked(Section):
    """A file that is put or got."""

    size_bytes: Annotated[int, Field(ge=0)] = 0
    so_far: Annotated[int, Field(ge=0)] = 0
    """Files that the session has put, or got, before."""


class UsageAsked(Section):
    """The use that a tenant would have made of its quotas, with this question."""

    sessions: int | None = None
    executions: int | None = None
    creations_per_minute: int | None = None
    cpu_time_s_per_hour: Number | None = None
    output_bytes_per_hour: int | None = None
    egress_bytes_per_hour: int | None = None
    calls: int | None = None
    calls_per_second: int | None = None


class Question(Section):
    """A session that a tenant asks for, and the requests in it."""

    image: str = ""
    backend: str = ""
    authorized_imports: tuple[str, ...] = ()
    limits: RequestedLimits = RequestedLimits()
    network: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    prelude: str = ""
    execution: RequestedLimits = RequestedLimits()
    """Limits asked for one execution."""
    tools: Annotated[tuple[ToolName, ...], Field(max_length=MAX_NAMES)] = ()
    """Names of tools that are registered, and answered by the client."""
    sandbox_tools: Annotated[tuple[ToolName, ...], Field(max_length=MAX_NAMES)] = ()
    """Names of tools that are registered after these, and shipped into the sandbox."""
    put_file: TransferAsked | None = None
    get_file: TransferAsked | None = None
    imports: Annotated[tuple[ModuleName, ...], Field(max_length=MAX_NAMES)] = ()
    """Modules that code imports."""
    workspace: Annotated[tuple[ModuleName, ...], Field(max_length=MAX_NAMES)] = ()
    """Those of them that are in the workspace."""
    connections: Annotated[tuple[HostAndPort, ...], Field(max_length=MAX_NAMES)] = ()
    """Hosts and ports that code connects to."""
    language: Annotated[tuple[LanguageRule, ...], Field(max_length=MAX_NAMES)] = ()
    """Rules that code breaks, as the error of its execution names them."""
    usage: UsageAsked = UsageAsked()


@dataclass(frozen=True)
class Answer:
    """The session that would be granted, every refusal, and everything that needs an approval."""

    spec: SessionSpec | None
    refusals: tuple[ExecutorError, ...]
    to_ask: tuple[Wanted, ...] = ()


def read_question(text: str) -> Question:
    """Reads a question in JSON. Raises ConfigError with each problem."""
    try:
        tables = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"is not JSON: {error}"]) from error
    if not isinstance(tables, dict):
        raise ConfigError(["must be a JSON object"])
    return validated(Question, tables)


def answer(policy: Policy, tenant: str, question: Question) -> Answer:
    """Answers the question. If the session is refused, nothing else is checked."""
    principal, session = Principal(tenant, "question"), _session(question)
    to_ask: tuple[Wanted, ...] = ()
    try:
        try:
            spec = policy.decide(principal, session)
        except ApprovalRequired as required:
            to_ask = required.wanted
            spec = policy.decide(principal, session, approved=to_ask)
    except ExecutorError as error:
        return Answer(None, (error,))
    refusals = tuple(_in_session(spec, policy.quotas_of(tenant), question))
    return Answer(spec, refusals, (*to_ask, *_to_ask_in(spec, question)))


def _session(question: Question) -> RequestedSession:
    return RequestedSession(
        image=question.image,
        backend=question.backend,
        network=question.network,
        packages=question.packages,
        authorized_imports=question.authorized_imports,
        limits=question.limits,
        labels=question.labels,
        prelude=question.prelude,
    )


def _tools(question: Question) -> list[ToolSpec]:
    places = [(question.tools, None), (question.sandbox_tools, ShippedTool(code=b""))]
    return [ToolSpec(name, "", (), is_final_answer=False, shipped=at) for names, at in places for name in names]


def _in_session(spec: SessionSpec, quotas: QuotasTable, question: Question) -> Iterator[ExecutorError]:
    yield from _refused(execution_limits, spec, question.execution)
    yield from _refused(check_tools, spec, _tools(question))
    for transfer, check in ((question.put_file, check_file_put), (question.get_file, check_file_get)):
        if transfer is not None:
            yield from _refused(check, spec, transfer.size_bytes, transfer.so_far)
    violations = (
        *_import_violations(spec, question.imports, question.workspace),
        *_connection_violations(spec, question.connections),
        *_language_violations(spec, question.language),
        *_usage_violations(spec.policy.profile, quotas, question.usage),
    )
    if violations:
        yield PolicyViolation(violations)


def _to_ask_in(spec: SessionSpec, question: Question) -> Iterator[Wanted]:
    for name in question.tools:
        if (wanted := tool_to_ask(spec, name)) is not None:
            yield wanted
    for text in question.connections:
        target = parse_authority(text)
        if not _reaches(spec.network.allowed, target) and _reaches(spec.network.ask, target):
            yield Wanted(ApprovalKind.HOST, text, rule_of(spec.policy.profile, "network.ask"))


def _reaches(hosts: Sequence[str], target: Target) -> bool:
    return any(pattern_of(host).covers(target) for host in hosts)


def _refused(check: Callable[..., object], *arguments: object) -> Iterator[ExecutorError]:
    try:
        check(*arguments)
    except ExecutorError as error:
        yield error


def _import_violations(spec: SessionSpec, modules: Sequence[str], own: Sequence[str]) -> Iterator[Violation]:
    profile = spec.policy.profile
    for module in modules:
        is_own = module in own
        if is_denied(module, spec.denied_imports):
            yield denied_import("imports", module, spec.denied_imports, profile)
        elif not is_covered(module, spec.authorized_imports) and not (is_own and spec.workspace_imports):
            rule = rule_of(profile, "imports.workspace" if is_own else "imports.default")
            yield not_allowed("imports", module, spec.authorized_imports, rule)


def _connection_violations(spec: SessionSpec, connections: Sequence[str]) -> Iterator[Violation]:
    profile, network = spec.policy.profile, spec.network
    for text in connections:
        target = parse_authority(text)
        if any(pattern_of(host).forbids(target) for host in network.denied):
            allowed = shortened(f"nothing of {listed(network.denied, '')}")
            yield Violation("connections", ViolationKind.DENIED, text, allowed, rule_of(profile, "network.denied"))
        elif not _reaches((*network.allowed, *network.ask), target):
            yield not_allowed("connections", text, network.allowed, rule_of(profile, "network.default"), "no network")


def _language_violations(spec: SessionSpec, rules: Sequence[str]) -> Iterator[Violation]:
    for rule in rules:
        if rule in spec.refused_language:
            key = rule_of(spec.policy.profile, f"language.{rule}")
            yield Violation("language", ViolationKind.DENIED, rule, "code without it", key)


def _usage_violations(profile: str, quotas: QuotasTable, usage: UsageAsked) -> Iterator[Violation]:
    for name, value in usage:
        most = getattr(quotas, name)
        if value is not None and most is not None and value > most:
            yield above_ceiling(f"usage.{name}", value, most, rule_of(profile, f"quotas.{name}"))
