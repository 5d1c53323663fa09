"""The fields of records of the audit log: the caller, the session, and the facts of the event.

AuditTrail and admission build their records with these functions. Records hold hashes, names and sizes of code, values
and files, never contents, except for code when the profile asks for it. Texts of clients and sandboxes are bounded here
or in chain.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from executor_server.core import (
    BlobRef,
    ExecutionLimits,
    NetworkRules,
    PackagesSpec,
    Payload,
    Principal,
    ProcessFacts,
    SessionFacts,
    SessionSpec,
    ShippedTool,
    ToolSource,
    ToolSpec,
)
from executor_server.core.lifecycle import StateFacts
from executor_server.policy.audit.chain import clipped

MAX_LISTED = 64
"""Names, tools or violations that are listed in a record."""

SHORT_CHARS = 128
"""Characters of an id or a name that a client chose."""


def of_principal(principal: Principal) -> dict[str, Any]:
    return {"tenant": principal.tenant, "principal": principal.name}


def of_session(session: SessionFacts) -> dict[str, Any]:
    return {
        **of_principal(session.owner),
        "session": session.session_id,
        "policy": session.policy.fingerprint,
    }


def of_execution(session: SessionFacts, execution_id: str) -> dict[str, Any]:
    return {**of_session(session), "execution": clipped(execution_id, SHORT_CHARS)}


def of_request(principal: Principal, request_id: str, spec: SessionSpec) -> dict[str, Any]:
    """Everything that is granted to a session, and as much of its prelude as the profile records of code."""
    prelude, recorded = spec.prelude.encode("utf-8", "surrogatepass"), spec.audit.code if spec.prelude else "none"
    fields = {
        **of_principal(principal),
        "request": clipped(request_id, SHORT_CHARS),
        "policy": spec.policy.fingerprint,
        "policy_version": spec.policy.version,
        "profile": spec.policy.profile,
        "image": spec.sandbox.image,
        "limits": vars(spec.limits),
        "execution_max": vars(spec.execution_max),
        "imports": spec.authorized_imports,
        "denied_imports": spec.denied_imports,
        "workspace_imports": spec.workspace_imports,
        "refused_language": spec.refused_language,
        "tool_placements": spec.tools.placements,
        "tool_names": spec.tools.allowed,
        "files": {name: most for name, most in vars(spec.files).items() if most is not None},
        "state": vars(spec.state),
        **_of_network(spec.network),
        **_of_packages(spec.sandbox.packages),
        "code_recorded": spec.audit.code,
        "fail_closed": spec.audit.fail_closed,
        "prelude_bytes": len(prelude),
        "labels": [f"{key}={value}" for key, value in spec.labels.items()],
    }
    if recorded != "none":
        fields["prelude_sha256"] = hashlib.sha256(prelude).hexdigest()
    if recorded == "full":
        fields["code"] = spec.prelude
    return fields


def _of_network(rules: NetworkRules) -> dict[str, Any]:
    """The hosts that a session may reach; a secret is listed by its host and the name of its header."""
    if not rules.any:
        return {}
    return {
        "network": rules.allowed,
        "denied_network": rules.denied,
        "network_secrets": [f"{secret.host} {secret.header}" for secret in rules.secrets],
    }


def _of_packages(packages: PackagesSpec | None) -> dict[str, Any]:
    """The packages that were asked for; those of the environment are in the record of its build."""
    if packages is None:
        return {}
    lock = {"packages_lock_sha256": packages.lock_sha256} if packages.lock_sha256 else {}
    return {"packages": packages.requirements, **lock}


def of_code(session: SessionFacts, execution_id: str, code: str, limits: ExecutionLimits) -> dict[str, Any]:
    """An execution, with as much of its code as the profile records."""
    source = code.encode("utf-8", "surrogatepass")
    fields: dict[str, Any] = {
        **of_session(session),
        "limits": vars(limits),
        "execution": clipped(execution_id, SHORT_CHARS),
        "code_bytes": len(source),
    }
    if session.audit.code != "none":
        fields["code_sha256"] = hashlib.sha256(source).hexdigest()
    if session.audit.code == "full":
        fields["code"] = code
    return fields


def of_command(session: SessionFacts, process: ProcessFacts) -> dict[str, Any]:
    """A process, with as much of its command line as the profile records of code. Never the value of a variable."""
    line = "\0".join(process.argv).encode("utf-8", "surrogatepass")
    fields: dict[str, Any] = {
        "process": process.process_id,
        "pty": process.has_pty,
        "env_names": [clipped(name, SHORT_CHARS) for name in process.env_names[:MAX_LISTED]],
        "command_bytes": len(line),
    }
    if session.audit.code != "none":
        fields["command_sha256"] = hashlib.sha256(line).hexdigest()
    if session.audit.code == "full":
        fields["command"] = list(process.argv)
    return fields


def of_input(session: SessionFacts, process_id: str, offset: int, data: bytes) -> dict[str, Any]:
    """Bytes for the input of a process, which may be code, with as much of them as the profile records of code."""
    fields: dict[str, Any] = {"process": process_id, "offset": offset, "bytes": len(data)}
    if session.audit.code != "none":
        fields["input_sha256"] = hashlib.sha256(data).hexdigest()
    if session.audit.code == "full":
        fields["input"] = data.decode("utf-8", "backslashreplace")
    return fields


def of_names(names: Sequence[str]) -> dict[str, Any]:
    return {"count": len(names), "names": [clipped(name, SHORT_CHARS) for name in names[:MAX_LISTED]]}


def of_state(state: StateFacts) -> dict[str, Any]:
    """A session's state: its digest, its size, and the session that it came from."""
    return {
        "state_sha256": state.sha256,
        "bytes": state.size_bytes,
        "variables": state.variables,
        "files": state.files,
        "foreign": state.is_foreign,
        "from_session": clipped(state.from_session, SHORT_CHARS),
    }


def of_tools(session: SessionFacts, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Tools that are registered; the parts of shipped ones by size and digest."""
    shipped = [_of_shipped(session, tool.name, tool.shipped) for tool in tools if tool.shipped is not None]
    return {**of_names([tool.name for tool in tools]), "shipped_count": len(shipped), "shipped": shipped[:MAX_LISTED]}


def _of_shipped(session: SessionFacts, name: str, shipped: ShippedTool) -> dict[str, Any]:
    code = shipped.code
    parts: dict[str, Payload | None] = (
        {"source": code.text.encode(), "bindings": code.bindings} if isinstance(code, ToolSource) else {"value": code}
    )
    fields: dict[str, Any] = {"name": clipped(name, SHORT_CHARS), "placement": "sandbox"}
    for part, payload in parts.items():
        if payload is not None:
            fields[f"{part}_bytes"] = payload.size_bytes if isinstance(payload, BlobRef) else len(payload)
            if session.audit.code != "none":
                fields[f"{part}_sha256"] = _digest(payload)
    return fields


def _digest(payload: Payload) -> str | None:
    return payload.sha256 if isinstance(payload, BlobRef) else hashlib.sha256(payload).hexdigest()
