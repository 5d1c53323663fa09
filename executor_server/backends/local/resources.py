"""The parts that all sandboxes of one daemon share, found and built once: tools, mounted files, filter, limits."""

from __future__ import annotations

import os
import platform
import re
import resource
import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from executor_server.backends.environments import Mount
from executor_server.backends.guest_archive import pack_guest
from executor_server.backends.local.bubblewrap import Bwrap
from executor_server.backends.local.bwrap_process import BwrapProcess, start_bwrap
from executor_server.backends.local.cgroups import Cgroup, CgroupTrees, NoCgroups
from executor_server.backends.local.images import Image
from executor_server.backends.local.layout import Layout, build_etc
from executor_server.backends.local.system import build_tools
from executor_server.core import SandboxSpec
from executor_server.guest.wire import rlimits

# Since this version RLIMIT_NPROC counts the processes of the user namespace, not all processes of the user.
_PER_NAMESPACE_COUNTS = (5, 14)


@dataclass(frozen=True)
class Resources:
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
    ) -> Resources:
        """Writes the files that sandboxes mount into `runtime_dir`. Blocks for a moment when they are missing."""
        runtime_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        layout = Layout(build_etc(runtime_dir), build_tools(runtime_dir), pack_guest(runtime_dir))
        return cls(bwrap, seccomp, layout, images, cgroups)

    @property
    def limits_memory(self) -> bool:
        """True when the kernel limits a sandbox's memory; else its supervisor must watch."""
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
        host_uid: int | None,
        cgroup: Cgroup | None,
        mounts: Sequence[Mount] = (),
        pass_fds: Sequence[int] = (),
        stdout: int = subprocess.DEVNULL,
    ) -> BwrapProcess:
        """Starts a sandbox that waits to be confined and released. `mounts` are in addition to every sandbox's."""
        arguments = self.layout.arguments(image, spec, mounts)
        return start_bwrap(
            self.bwrap.path,
            arguments,
            command,
            guest=self.layout.guest.path,
            host_uid=host_uid,
            seccomp=self.seccomp,
            cgroup=cgroup,
            pass_fds=pass_fds,
            stdout=stdout,
        )

    def make_cgroup(self, daemon_id: str, sandbox_id: str, spec: SandboxSpec) -> Cgroup | None:
        if isinstance(self.cgroups, NoCgroups):
            return None
        name = self.cgroups.name(daemon_id, sandbox_id)
        return self.cgroups.create(name, memory_bytes=spec.memory_bytes, processes=spec.processes, cpus=spec.cpus)

    def leftover_cgroups(self, daemon_id: str, living: Collection[str]) -> list[Cgroup]:
        return [] if isinstance(self.cgroups, NoCgroups) else self.cgroups.leftovers(daemon_id, living)

    def rlimits(self, spec: SandboxSpec) -> dict[int, int]:
        """Resource limits of the sandbox's first process; the others inherit them and cannot raise them."""
        limits = {rlimits.kind(name): value for name, value in rlimits.FIXED.items()}
        limits[resource.RLIMIT_FSIZE] = spec.disk_bytes
        if not self.limits_processes and (os.geteuid() == 0 or _kernel_version() >= _PER_NAMESPACE_COUNTS):
            limits[resource.RLIMIT_NPROC] = spec.processes
        return {limit: _within_own(limit, value) for limit, value in limits.items()}


def _within_own(limit: int, value: int) -> int:
    """Lowers the value to the daemon's own hard limit, which an ordinary user cannot exceed."""
    _, hard = resource.getrlimit(limit)
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _kernel_version() -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(found[1]), int(found[2])) if found else (0, 0)
