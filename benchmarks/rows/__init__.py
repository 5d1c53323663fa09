"""The measurements, by the names that `--only` takes, in the order of the table.

A module of rows is imported when one of its rows is measured: a row that this environment, or another commit, can't
import does not affect the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module

from benchmarks.bench import Bench
from benchmarks.figures import Figure

Measurement = Callable[[Bench], Iterator[Figure]]

MEASUREMENTS: dict[str, str] = {
    "session": "sessions:ready",
    "imports": "sessions:imports",
    "forked": "forked:ready",
    "forked-burst": "forked:burst",
    "forked-throughput": "forked:throughput",
    "forked-crowd": "forked:crowd",
    "execute": "executions:execute",
    "lines": "executions:printed_lines",
    "array": "values:array",
    "tool": "tools:tool_call",
    "process": "processes:run",
    "terminal": "processes:echo",
    "output": "processes:output",
    "file": "files:read",
    "file-large": "files:transfer",
    "port": "ports:forward",
    "loop": "programs:loops",
    "mixed": "programs:mixed",
    "savepoints": "savepoints:savepoints",
    "recording": "recordings:recordings",
    "viewers": "viewers:viewers",
    "console": "console:pages",
    "console-changes": "console:changes",
    "recording-daemon": "recordings:daemon_recordings",
    "throughput": "sessions:throughput",
    "memory": "memory:idle",
    "crowd": "memory:crowd",
    "live": "crowds:live",
    "local": "local_agent:local_executor",
    "local-programs": "local_agent:programs",
    "journal": "journals:journals",
    "recovery": "recovery:local",
    "flood": "flood:local",
    "egress": "egress:local",
    "connect": "gateway:connect",
    "e2b": "gateway:e2b",
    "packages": "packages:local",
    "fleet-simulated": "simulated_fleet:simulated",
    "fleet-create": "fleet:creation",
    "fleet-execute": "fleet:execution",
    "fleet-deaths": "fleet:deaths",
    "fleet-front": "fleet:fronts",
    "fleet-front-ray": "fleet:fronts_on_ray",
    "docker-warm": "containers:warm",
    "docker-cold": "containers:cold",
    "docker-execute": "containers:execute",
    "docker-burst": "containers:burst",
    "docker-throughput": "containers:throughput",
    "docker-memory": "jupyter:memory",
    "docker-recovery": "recovery:docker",
    "docker-preload": "preload:pandas",
    "docker-flood": "flood:docker",
    "docker-executor": "jupyter:docker_executor",
}
"""Module of this package, and function of it, for each name."""


def measurement(name: str) -> Measurement:
    """Raises ImportError, AttributeError if this environment lacks something that the row needs."""
    module, _, function = MEASUREMENTS[name].partition(":")
    found: Measurement = getattr(import_module(f"benchmarks.rows.{module}"), function)
    return found
