"""Sends the caller's OpenTelemetry trace to the daemon, if the process traces; else it costs one dictionary lookup.

Only the W3C trace context is sent (`traceparent`, `tracestate`): baggage is the application's own.
"""

from __future__ import annotations

import sys

Metadata = tuple[tuple[str, str], ...]


def current_trace() -> Metadata:
    """Returns the metadata that names the current span; empty if there is none."""
    if "opentelemetry.trace" not in sys.modules:
        return ()
    # Optional: this library does not depend on it, and here the process has loaded most of it.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())
