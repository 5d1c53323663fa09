"""Audit logs for tests: written as the daemon writes them, and read as a person would."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from executor_server.core.model import AuditRules, PolicyRef, Principal, SessionFacts
from executor_server.policy.audit.chain import AuditKind
from executor_server.policy.audit.log import AuditLog, AuditSettings
from executor_server.policy.audit.log_files import AuditFiles

PRINCIPAL = Principal("acme", "ci")
KIND = AuditKind.VARIABLES_SET


@asynccontextmanager
async def audit_log(
    directory: Path,
    *,
    sync: Literal["always", "interval", "never"] = "interval",
    sync_interval_s: float = 0.01,
    max_file_bytes: int = 2**20,
    max_files: int | None = None,
    files: type[AuditFiles] = AuditFiles,
) -> AsyncIterator[AuditLog]:
    kept = files(directory, max_file_bytes=max_file_bytes, max_files=max_files, anchor_after_sync=sync == "always")
    log = AuditLog(kept, AuditSettings(sync, sync_interval_s))
    await log.start()
    try:
        yield log
    finally:
        await log.close()


async def write_log(directory: Path, records: int = 20, **options: Any) -> None:
    """Writes a number of further records."""
    async with audit_log(directory, **options) as log:
        for number in range(records):
            assert log.write(KIND, {"tenant": "acme", "number": number})


def paths(directory: Path) -> list[Path]:
    return sorted(directory.glob("audit-*.jsonl"))


def records(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths(directory) for line in path.read_bytes().splitlines()]


def kinds(directory: Path) -> list[str]:
    return [record["kind"] for record in records(directory)]


def facts(*, code: Literal["none", "hash", "full"] = "hash", fail_closed: bool = False) -> SessionFacts:
    return SessionFacts(
        session_id="5" * 32,
        owner=PRINCIPAL,
        policy=PolicyRef("default", "7", "f" * 16),
        audit=AuditRules(code=code, fail_closed=fail_closed),
        backend="local",
        image="base",
        warm=True,
        request_id="r1",
    )
