"""The answer of Reload, which a daemon and a front give alike."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from executor_api.v1 import admin_service_pb2 as admin_pb
from executor_server.core import InvalidRequest, Reason
from executor_server.core.config import ConfigError
from executor_server.policy import Policy


async def reloaded(reload: Callable[[], Awaitable[bool]], policy: Callable[[], Policy]) -> admin_pb.ReloadResponse:
    """Reads policy and tokens again. Raises InvalidRequest with each problem; nothing has changed then."""
    try:
        changed = await reload()
    except ConfigError as error:
        listed = "\n".join(error.problems)
        raise InvalidRequest(Reason.INVALID_FIELD, f"not valid, so nothing has changed:\n{listed}") from error
    now = policy()
    return admin_pb.ReloadResponse(version=now.version, fingerprint=now.fingerprint, changed=changed)
