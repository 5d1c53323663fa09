"""Metrics for Prometheus and traces for OpenTelemetry, kept as things happen or read off the daemon's parts.

It watches through the protocols of `core.lifecycle`; nothing below it knows that it is there. `tracing` needs an
extra and is imported by itself, where it is configured.
"""

from executor_server.telemetry.endpoint import MetricsEndpoint
from executor_server.telemetry.metrics import Metrics
from executor_server.telemetry.sources import Sources, SourcesCollector
from executor_server.telemetry.timed_admission import TimedAdmission
