"""The measurements, by the names that `--only` takes, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.bench import Bench
from benchmarks.figures import Figure
from benchmarks.rows import (
    containers,
    egress,
    executions,
    fleet,
    flood,
    journals,
    jupyter,
    local_agent,
    memory,
    packages,
    ports,
    preload,
    processes,
    programs,
    recovery,
    sessions,
    simulated_fleet,
    tools,
    values,
)

Measurement = Callable[[Bench], Iterator[Figure]]

MEASUREMENTS: dict[str, Measurement] = {
    "session": sessions.ready,
    "execute": executions.execute,
    "lines": executions.printed_lines,
    "array": values.array,
    "tool": tools.tool_call,
    "process": processes.run,
    "terminal": processes.echo,
    "output": processes.output,
    "port": ports.forward,
    "loop": programs.loops,
    "mixed": programs.mixed,
    "throughput": sessions.throughput,
    "memory": memory.idle,
    "local": local_agent.local_executor,
    "journal": journals.journals,
    "recovery": recovery.local,
    "flood": flood.local,
    "egress": egress.local,
    "packages": packages.local,
    "fleet-simulated": simulated_fleet.simulated,
    "fleet-create": fleet.creation,
    "fleet-execute": fleet.execution,
    "fleet-deaths": fleet.deaths,
    "fleet-front": fleet.fronts,
    "docker-warm": containers.warm,
    "docker-cold": containers.cold,
    "docker-execute": containers.execute,
    "docker-burst": containers.burst,
    "docker-throughput": containers.throughput,
    "docker-memory": jupyter.memory,
    "docker-recovery": recovery.docker,
    "docker-preload": preload.pandas,
    "docker-flood": flood.docker,
    "docker-executor": jupyter.docker_executor,
}
