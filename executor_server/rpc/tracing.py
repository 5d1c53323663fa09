"""Makes a span of each call, below the one that the client says it is in."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from executor_server.config import TracingSection
from executor_server.rpc.errors import Context
from executor_server.rpc.handlers import Around, Behaviour, status_of
from executor_server.settings import ConfigError

if TYPE_CHECKING:
    from executor_server.tracing import Tracing


def load_tracing(section: TracingSection, version: str) -> Tracing | None:
    """What the configuration asks for; None when it names no endpoint. Raises ConfigError when the SDK is missing."""
    if section.endpoint is None:
        return None
    try:
        # Imported here: it is an extra, and nobody else pays for its imports.
        from executor_server.tracing import make_tracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"tracing.endpoint: needs {error.name}, which is not installed: pip install 'remote-executor[otel]'"]
        ) from error
    return make_tracing(
        section.endpoint, service_name=section.service_name, version=version, sample_ratio=section.sample_ratio
    )


def call_tracing(tracing: Tracing) -> Around:
    """An interceptor that traces every call of ours. To be put behind authentication."""

    def around(method: str, behaviour: Behaviour) -> Behaviour:
        async def traced(request: Any, context: Context) -> Any:
            with tracing.call(method, context.invocation_metadata() or ()) as span:
                try:
                    answer = await behaviour(request, context)
                except asyncio.CancelledError:
                    tracing.end_call(span, "CANCELLED")
                    raise
                except BaseException:  # the border below has set the status
                    tracing.end_call(span, status_of(context))
                    raise
                tracing.end_call(span, "OK")
                return answer

        return traced

    return Around(around)
