"""What every sandbox of one daemon is made with, found and built once: the tools, the mounts' sources, the limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.local.bubblewrap import Bwrap
from executor_server.backends.local.cgroups import Cgroup, CgroupTrees, NoCgroups
from executor_server.backends.local.images import Image
from executor_server.backends.local.layout import Layout, build_etc
from executor_server.backends.local.process import BwrapProcess, start_bwrap
from executor_server.backends.local.system import build_tools
from executor_server.guest_archive import pack_guest
from executor_server.model import SandboxSpec

_OPEN_FILES = 4096
_LOCKED_MEMORY_BYTES = 65_536
# Since this version a limit of processes counts within the user namespace, not over all that the user runs.
_PER_NAMESPACE_COUNTS = (5, 14)


@dataclass(frozen=True)
class Kit:
    bwrap: Bwrap
    seccomp: bytes
    layout: Layout
    images: Mapping[str, Image]
    cgroups: CgroupTrees | NoCgroups

    @classmethod
    def build(
        cls,
        runtime_dir: Path,
        bwrap: Bwrap,
        seccomp: bytes,
        images: Mapping[str, Image],
        cgroups: CgroupTrees | NoCgroups,
    ) -> Kit:
        """Writes what sandboxes mount into `runtime_dir`. Blocks for a moment when it is not there yet."""
        runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        layout = Layout(build_etc(runtime_dir), build_tools(runtime_dir), pack_guest(runtime_dir))
        return cls(bwrap, seccomp, layout, images, cgroups)

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel limits a sandbox's memory; else its supervisor must watch."""
        return isinstance(self.cgroups, CgroupTrees)

    @property
    def limits_processes(self) -> bool:
        return isinstance(self.cgroups, CgroupTrees) and "pids" in self.cgroups.parents

    def start(
        self,
        image: Image,
        spec: SandboxSpec,
        command: Sequence[str],
        *,
        cgroup: Cgroup | None,
        pass_fds: Sequence[int] = (),
        stdout: int = subprocess.DEVNULL,
    ) -> BwrapProcess:
        """Starts a sandbox that waits to be confined and released."""
        arguments = self.layout.arguments(image, spec)
        return start_bwrap(
            self.bwrap.path, arguments, command, seccomp=self.seccomp, cgroup=cgroup, pass_fds=pass_fds, stdout=stdout
        )

    def make_cgroup(self, daemon_id: str, sandbox_id: str, spec: SandboxSpec) -> Cgroup | None:
        if isinstance(self.cgroups, NoCgroups):
            return None
        name = self.cgroups.name(daemon_id, sandbox_id)
        return self.cgroups.create(name, memory_bytes=spec.memory_bytes, processes=spec.processes, cpus=spec.cpus)

    def leftover_cgroups(self, daemon_id: str, living: Collection[str]) -> list[Cgroup]:
        return [] if isinstance(self.cgroups, NoCgroups) else self.cgroups.leftovers(daemon_id, living)

    def rlimits(self, spec: SandboxSpec) -> dict[int, int]:
        """Limits that the sandbox's first process, and so all of them, start with and cannot raise."""
        limits = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: _OPEN_FILES,
            resource.RLIMIT_FSIZE: spec.disk_bytes,
            resource.RLIMIT_MEMLOCK: _LOCKED_MEMORY_BYTES,
        }
        if not self.limits_processes and (os.geteuid() == 0 or _kernel_version() >= _PER_NAMESPACE_COUNTS):
            limits[resource.RLIMIT_NPROC] = spec.processes
        return {limit: _at_most_ours(limit, value) for limit, value in limits.items()}


def _at_most_ours(limit: int, value: int) -> int:
    """An ordinary user cannot give more than it has."""
    _, hard = resource.getrlimit(limit)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)
