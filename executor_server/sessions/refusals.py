"""Turns what a backend failed with into what the caller is answered."""

from __future__ import annotations

import structlog

from executor_server.core import (
    BackendFull,
    EnvironmentFailed,
    ExecutorError,
    ImageNotReady,
    PreconditionFailed,
    Reason,
    ResourceExhausted,
    SandboxFailure,
    SandboxSpec,
    SpecUnsupported,
    Unavailable,
)

_log = structlog.get_logger(__name__)


def refusal_of(failure: SandboxFailure, spec: SandboxSpec) -> ExecutorError:
    """Returns the refusal of a request for such a sandbox, or for its environment.

    A failure whose text is internal is logged here, and only here.
    """
    match failure:
        case EnvironmentFailed():
            return PreconditionFailed(Reason.ENVIRONMENT_FAILED, str(failure))
        case ImageNotReady():
            return Unavailable(Reason.IMAGE_NOT_READY, str(failure), failure.retry_after_s, progress=failure.progress)
        case BackendFull():
            _log.warning("backend_full", image=spec.image, error=str(failure), retry_after_s=failure.retry_after_s)
            message = "there are as many sandboxes as there may be; end a session, or try again later"
            return ResourceExhausted(Reason.BACKEND_FULL, message, failure.retry_after_s)
        case SpecUnsupported():
            return Unavailable(Reason.BACKEND_UNAVAILABLE, str(failure))
        case _:
            _log.error("sandbox_not_made", image=spec.image, error=str(failure))
            message = "no sandbox can be made now; the daemon's log says why"
            return Unavailable(Reason.BACKEND_UNAVAILABLE, message)
