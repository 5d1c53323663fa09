"""Options of a sandbox's container: turns a request into the body of `POST /containers/create`.

Everything that the image could decide for itself is decided here instead: command, user, working directory, health
check, volumes. The image decides only its files and its environment variables, and ours take precedence.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from executor_server.backends.control_groups import SOCKETS_PART
from executor_server.backends.docker.seccomp import profile
from executor_server.backends.settings import HOSTNAME, VAR_TMP, WORKSPACE, sandbox_environment, shm_bytes
from executor_server.core import SandboxSpec
from executor_server.guest.wire import rlimits

# The runtime itself counts towards the limits of a container that it starts, and runc's first process has several
# threads until it executes the guest. So the group's limit is at least this, and a lower limit is enforced by
# RLIMIT_NPROC of the sandbox's own user.
_RUNTIME_PROCESSES = 32
# A program may execute the files that it puts there. The owner is named because runc gives a mount the mode of the
# directory that it covers, which the Engine has just made for root alone.
_TMPFS = "rw,exec,nosuid,nodev,mode=1777,uid={user},gid={user},size={size_bytes},nr_inodes={inodes}"
_HIDDEN_VOLUME = "ro,noexec,nosuid,nodev,size=4k,mode=0555"
_LOG_BYTES = 65_536
# Other runtimes may have a kernel of their own, which could not show a file system of the host's.
_HOST_KERNEL_RUNTIMES = ("runc", "crun", "youki")
# A separate devpts with few terminals: through the Engine's, a sandbox could take all of the machine's. It is removed
# with the container.
_TERMINALS = {
    "Type": "volume",
    "Target": "/dev/pts",
    "VolumeOptions": {
        "NoCopy": True,
        "DriverConfig": {
            "Name": "local",
            "Options": {"type": "devpts", "device": "devpts", "o": "newinstance,ptmxmode=0666,mode=620,max=64"},
        },
    },
}

# The Engine's own choice (moby `oci/defaults.go`), and all of /sys: it shows the host's devices and control groups,
# and no program of an agent needs it.
_MASKED = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys",
)
_READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")


@dataclass(frozen=True)
class HostAbilities:
    """Limits that the Engine can enforce. It would refuse or ignore others."""

    machine: str  # as uname -m
    processors: int
    limits_memory: bool
    limits_processors: bool
    has_swappiness: bool
    limits_sockets: bool = False  # by control groups of version 1, which count them separately
    runtime: str = "runc"  # the Engine's default


@dataclass(frozen=True)
class Bind:
    """A file or a directory of the host that the container sees."""

    source: Path
    target: str
    read_only: bool


@dataclass(frozen=True)
class ContainerRequest:
    image_id: str
    image_volumes: tuple[str, ...]
    command: tuple[str, ...]
    user: int
    spec: SandboxSpec
    labels: Mapping[str, str]
    binds: tuple[Bind, ...] = ()
    runtime: str | None = None  # None: the Engine's default
    environment: Mapping[str, str] = field(default_factory=dict)  # in addition to that of every sandbox
    shares_user: bool = False  # other containers run as its user, too
    keeps_log: bool = False  # a little of its first process's output


def container_config(request: ContainerRequest, host: HostAbilities) -> dict[str, Any]:
    """The body of the request that makes the container."""
    environment = {**sandbox_environment(request.spec.processes), **request.environment}
    return {
        "Image": request.image_id,
        # The whole command as the entry point, so that neither the image's own entry point nor its command is run.
        "Entrypoint": list(request.command),
        "Cmd": [],
        "User": f"{request.user}:{request.user}",
        "WorkingDir": WORKSPACE,
        "Hostname": HOSTNAME,
        "Env": [f"{name}={value}" for name, value in environment.items()],
        "Labels": dict(request.labels),
        "Healthcheck": {"Test": ["NONE"]},
        # The supervisor ignores all other signals: an Engine that shuts down would wait ten seconds for its end.
        "StopSignal": "SIGKILL",
        # With NetworkMode "none" alone the Engine makes a network namespace and configures it: 100 ms. Disabled, the
        # runtime makes an empty one, which has nothing but loopback all the same.
        "NetworkDisabled": True,
        "AttachStdin": False,
        "OpenStdin": False,
        "Tty": False,
        "HostConfig": {**_isolation(request, host), **_files(request, host), **_limits(request, host)},
    }


def _isolation(request: ContainerRequest, host: HostAbilities) -> dict[str, Any]:
    isolation: dict[str, Any] = {
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Privileged": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", f"seccomp={profile(host.machine)}"],
        "MaskedPaths": list(_MASKED),
        "ReadonlyPaths": list(_READ_ONLY),
        "Devices": [],
        "Init": False,
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": _log_config(keeps_log=request.keeps_log),
    }
    if request.runtime is not None:
        isolation["Runtime"] = request.runtime
    return isolation


def _log_config(*, keeps_log: bool) -> dict[str, Any]:
    if not keeps_log:
        return {"Type": "none"}
    return {"Type": "json-file", "Config": {"max-size": str(_LOG_BYTES), "max-file": "1"}}


def _files(request: ContainerRequest, host: HostAbilities) -> dict[str, Any]:
    spec = request.spec
    # One inode more, for the file system's own directory.
    tmpfs = _TMPFS.format(user=request.user, size_bytes=spec.disk_bytes, inodes=spec.max_files + 1)
    writable = dict.fromkeys(("/tmp", VAR_TMP, WORKSPACE), tmpfs)
    return {
        "ReadonlyRootfs": True,
        "Tmpfs": {**_hidden(request.image_volumes, (*writable, "/dev/shm")), **writable},
        "ShmSize": shm_bytes(spec.disk_bytes, spec.memory_bytes),
        "Mounts": [
            {
                "Type": "bind",
                "Source": str(bind.source),
                "Target": bind.target,
                "ReadOnly": bind.read_only,
                "BindOptions": {"Propagation": "rprivate"},
            }
            for bind in request.binds
        ]
        + ([_TERMINALS] if (request.runtime or host.runtime) in _HOST_KERNEL_RUNTIMES else []),
    }


def _hidden(volumes: Iterable[str], ours: tuple[str, ...]) -> dict[str, str]:
    """Covers the image's volumes, which would be directories of the host's disk, writable and without a limit."""
    places = {posixpath.normpath("/" + volume.lstrip("/")) for volume in volumes}
    return {place: _HIDDEN_VOLUME for place in sorted(places) if place not in ours}


def _limits(request: ContainerRequest, host: HostAbilities) -> dict[str, Any]:
    spec = request.spec
    limits: dict[str, Any] = {
        "Memory": spec.memory_bytes,
        "MemorySwap": spec.memory_bytes,  # memory and swap together
        "PidsLimit": max(spec.processes, _RUNTIME_PROCESSES),
        "Ulimits": [
            {"Name": name, "Soft": value, "Hard": value}
            for name, value in (
                # It counts the processes of a user, in whatever container they are.
                *(() if request.shares_user else (("nproc", spec.processes),)),
                ("fsize", spec.disk_bytes),
                # The supervisor's reserve is for sandboxes that share a user, and the Engine may be allowed less.
                *{**rlimits.FIXED, "nofile": 2 * rlimits.OPEN_FILES}.items(),
            )
        ],
    }
    if host.has_swappiness:
        limits["MemorySwappiness"] = 0
    if host.limits_sockets:
        limits["KernelMemoryTCP"] = spec.memory_bytes // SOCKETS_PART
    if spec.cpus is not None and host.limits_processors:
        limits["NanoCpus"] = int(min(spec.cpus, host.processors) * 1_000_000_000)
    return limits
