"""Carries the caller's OpenTelemetry trace to the daemon, in a process that traces; in any other it costs a look.

Only the W3C trace context travels (`traceparent`, `tracestate`): baggage is the application's own.
"""

from __future__ import annotations

import sys

Metadata = tuple[tuple[str, str], ...]


def current_trace() -> Metadata:
    """What names the current span to the daemon; empty when there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    # Loaded already, or next to nothing beside what is: this library does not depend on it.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
