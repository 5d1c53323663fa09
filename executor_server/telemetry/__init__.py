"""Metrics for Prometheus and traces for OpenTelemetry, updated as things happen or read from the daemon's parts.

It watches through the protocols of `core.lifecycle`; the layers below don't know it. `tracing` needs an extra and is
imported by itself, where it is configured.
"""

from executor_server.telemetry.endpoint import MetricsEndpoint
from executor_server.telemetry.metrics import Metrics
from executor_server.telemetry.sources import Sources, SourcesCollector
from executor_server.telemetry.timed_admission import TimedAdmission
