"""Makes a span for each call, as a child of the client's span."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from executor_server.api.handlers import Behaviour, Context, Wrapper, around_own_methods, status_of
from executor_server.core.config import ConfigError, TracingSection

if TYPE_CHECKING:
    from executor_server.telemetry.tracing import Tracing


def load_tracing(section: TracingSection, version: str) -> Tracing | None:
    """Returns the configured tracing; None when no endpoint is set. Raises ConfigError when the SDK is missing."""
    if section.endpoint is None:
        return None
    try:
        # Imported here, because the SDK is an extra and takes a while to import.
        from executor_server.telemetry.tracing import make_tracing
    except ModuleNotFoundError as error:
        raise ConfigError(
            [f"tracing.endpoint: needs {error.name}, but it is not installed: pip install 'remote-executor[otel]'"]
        ) from error
    return make_tracing(
        section.endpoint, service_name=section.service_name, version=version, sample_ratio=section.sample_ratio
    )


def call_tracing(tracing: Tracing) -> Wrapper:
    """Returns a wrapper that traces every call of our services, for use after authentication."""

    def around(method: str, behaviour: Behaviour) -> Behaviour:
        async def traced(request: Any, context: Context) -> Any:
            with tracing.call(method, context.invocation_metadata() or ()) as span:
                try:
                    answer = await behaviour(request, context)
                except asyncio.CancelledError:
                    tracing.end_call(span, "CANCELLED")
                    raise
                except BaseException:  # the error border has set the status
                    tracing.end_call(span, status_of(context))
                    raise
                tracing.end_call(span, "OK")
                return answer

        return traced

    return around_own_methods(around)
