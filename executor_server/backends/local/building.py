"""Makes the parts of a sandbox on the host, one after the other, until its guest accepts connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import structlog

from executor_server.backends.environments import Mount, have_environment
from executor_server.backends.local.bwrap_process import BwrapProcess
from executor_server.backends.local.cgroups import BESIDE_SANDBOX
from executor_server.backends.local.descriptors import read_within
from executor_server.backends.local.file_counts import limit_files
from executor_server.backends.local.fork_server.fork import SandboxPlan
from executor_server.backends.local.fork_server.fork_server import Blueprint
from executor_server.backends.local.fork_server.fork_servers import Fallback, ForkServers, below_tmp
from executor_server.backends.local.fork_server.forked_process import ForkedProcess, ForkFailed
from executor_server.backends.local.images import Image
from executor_server.backends.local.layout import SANDBOX_ID, environment_of
from executor_server.backends.local.records import ProcessRecord, Record, remove_record, write_record
from executor_server.backends.local.resources import Resources
from executor_server.backends.local.sandbox import LocalSandbox
from executor_server.backends.settings import BACKLOG, WORKSPACE, guest_config, shm_bytes
from executor_server.core import SandboxFailure, SandboxSpec
from executor_server.guest.wire.paths import GUEST_BOOT
from executor_server.guest.wire.tokens import CHAIN_LENGTH

_CREATE_TIMEOUT_S = 20.0

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Plan:
    """The parts that a sandbox is made of."""

    resources: Resources
    image: Image
    spec: SandboxSpec
    mounts: tuple[Mount, ...] = ()  # besides those of every sandbox


def blueprint_of(plan: Plan, fork_servers: ForkServers) -> Blueprint:
    """Returns the blueprint of the fork server for such sandboxes. Raises Fallback where only bubblewrap makes them."""
    if plan.mounts or plan.spec.packages is not None:
        raise Fallback("unsupported", "it has mounts of its own")
    return fork_servers.blueprint(plan.resources, plan.image, plan.spec)


async def build_sandbox(sandbox: LocalSandbox, plan: Plan, daemon_id: str, fork_servers: ForkServers) -> None:
    """Acquires the sandbox's parts on the host, step by step; `destroy` releases the acquired ones.

    A fork server forks the sandbox where the spec allows it. Otherwise, or if that fails, bubblewrap makes it. Raises
    SandboxFailure or OSError.
    """
    sandbox.directory.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        cpu_fd = _make_group(sandbox, plan, daemon_id, stack)
        # Bound outside, in a directory that only we can enter: no file inside leads to the supervisor.
        listener = stack.enter_context(_listen(sandbox.endpoint.socket_path))
        if plan.spec.fork_server != "off":
            try:
                await _fork(sandbox, plan, fork_servers, listener.fileno(), cpu_fd)
            except Fallback as fallback:
                fork_servers.note_fallback(fallback)
                _forget_fork(sandbox, plan.spec)
                if sandbox.cgroup is not None and sandbox.cgroup.oom_kills():
                    # Otherwise a program of the new sandbox would be taken for the one that the kernel killed.
                    await sandbox.cgroup.remove(asyncio.get_running_loop().time() + _CREATE_TIMEOUT_S)
                    cpu_fd = _make_group(sandbox, plan, daemon_id, stack)
            else:
                return
        await _start_bwrap(sandbox, plan, listener.fileno(), cpu_fd)


def _make_group(sandbox: LocalSandbox, plan: Plan, daemon_id: str, stack: contextlib.ExitStack) -> int | None:
    """Makes the sandbox's control group; returns its counter of processor time, which the stack closes."""
    sandbox.cgroup = plan.resources.make_cgroup(daemon_id, sandbox.sandbox_id, plan.spec)
    cpu_fd = sandbox.cgroup.open_cpu_counter() if sandbox.cgroup is not None else None
    if cpu_fd is not None:
        stack.callback(os.close, cpu_fd)
    return cpu_fd


async def _fork(
    sandbox: LocalSandbox, plan: Plan, fork_servers: ForkServers, listener: int, cpu_fd: int | None
) -> None:
    """Has a fork server make the sandbox. Raises Fallback; nothing of it runs then."""
    resources, spec = plan.resources, plan.spec
    blueprint = blueprint_of(plan, fork_servers)

    def on_here(pid: int, process: ForkedProcess) -> None:
        sandbox.process = process
        try:
            first = ProcessRecord.of(pid)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise ForkFailed("failed", "the fork has ended before its record was written") from error
        if process.has_ended():  # and the id may be another process's
            raise ForkFailed("failed", "the fork has ended before its record was written")
        record = Record(
            sandbox_id=sandbox.sandbox_id,
            fingerprint=sandbox.fingerprint,
            first=first,
            monitor=None,
            host_uid=sandbox.host_uid,
            cgroup=sandbox.cgroup,
            fork_server=process.fork_server_id,
        )
        write_record(sandbox.directory, record)

    with contextlib.ExitStack() as stack:
        groups: list[int] = []
        if sandbox.cgroup is not None:
            sandbox.cgroup.set_processes(spec.processes)  # no bubblewrap is in the group
            groups = sandbox.cgroup.open_entrances()
            for fd in groups:
                stack.callback(os.close, fd)

        def planned(imported: tuple[str, ...]) -> SandboxPlan:
            preload = [name for name in plan.image.preload if name not in imported]
            return SandboxPlan(
                guest=_guest_settings(plan, sandbox, preload),
                sizes={
                    "disk": spec.disk_bytes,
                    "shm": shm_bytes(spec.disk_bytes, spec.memory_bytes),
                    "files": spec.max_files,
                },
                rlimits=resources.rlimits(spec),
                host_uid=sandbox.host_uid,
                seccomp=resources.seccomp,
                environment={**environment_of(plan.image, spec), "PWD": WORKSPACE},
                below_tmp=below_tmp(plan.image),
                listener=listener,
                cpu_counter=cpu_fd,
                groups=groups,
            )

        await fork_servers.make(blueprint, planned, on_here)


def _forget_fork(sandbox: LocalSandbox, spec: SandboxSpec) -> None:
    """Removes what a failed fork left behind, so that bubblewrap can begin."""
    sandbox.process = None
    remove_record(sandbox.directory)
    if sandbox.cgroup is not None:
        sandbox.cgroup.set_processes(spec.processes + BESIDE_SANDBOX)


async def _start_bwrap(sandbox: LocalSandbox, plan: Plan, listener: int, cpu_fd: int | None) -> None:
    deadline = asyncio.get_running_loop().time() + _CREATE_TIMEOUT_S
    resources, spec = plan.resources, plan.spec
    ready_read, ready_write = os.pipe()
    with os.fdopen(ready_read, "rb"):
        with contextlib.closing(os.fdopen(ready_write, "wb")):
            config = _guest_config(plan, sandbox, listener, cpu_fd)
            command = [str(plan.image.python), "-I", "-S", "-c", GUEST_BOOT, json.dumps(config), str(ready_write)]
            pass_fds = (listener, ready_write, *(() if cpu_fd is None else (cpu_fd,)))
            process = resources.start(
                plan.image,
                spec,
                command,
                host_uid=sandbox.host_uid,
                cgroup=sandbox.cgroup,
                mounts=plan.mounts,
                pass_fds=pass_fds,
            )
            sandbox.process = process

        def record(pid: int) -> None:
            write_record(sandbox.directory, _record_of(sandbox, pid, process.popen.pid))

        await process.confine_and_release(rlimits=resources.rlimits(spec), on_held=record, deadline=deadline)
        answer = await read_within(ready_read, 1, deadline)
    if not answer:
        state = "does not start in time" if answer is None else "ended at once"
        raise SandboxFailure(f"the guest {state}: {process.last_words()}")
    if sandbox.host_uid is not None:  # bubblewrap mounts it as root
        os.chown(f"/proc/{process.init_pid}/root{WORKSPACE}", sandbox.host_uid, sandbox.host_uid)
    await _limit_files(process, spec)


async def _limit_files(process: BwrapProcess, spec: SandboxSpec) -> None:
    """Limits the files before anything is sent to the guest. A host that does not allow it serves all the same."""
    assert process.init_pid is not None
    try:
        await asyncio.to_thread(limit_files, process.init_pid, spec.max_files)
    except OSError as error:
        _warn_of_files(str(error))


@lru_cache(maxsize=8)  # one warning for each reason
def _warn_of_files(reason: str) -> None:
    _log.warning("files_not_limited", reason=reason)


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _record_of(sandbox: LocalSandbox, first_pid: int, monitor_pid: int) -> Record:
    return Record(
        sandbox_id=sandbox.sandbox_id,
        fingerprint=sandbox.fingerprint,
        first=ProcessRecord.of(first_pid),
        monitor=ProcessRecord.of(monitor_pid),
        host_uid=sandbox.host_uid,
        cgroup=sandbox.cgroup,
    )


def _guest_config(plan: Plan, sandbox: LocalSandbox, listen_fd: int, cpu_fd: int | None) -> dict[str, object]:
    return {
        "listen_fd": listen_fd,
        **({} if cpu_fd is None else {"cpu_fd": cpu_fd}),
        "drop_to": None if sandbox.host_uid is None else [SANDBOX_ID, SANDBOX_ID],
        **_guest_settings(plan, sandbox, plan.image.preload),
    }


def _guest_settings(plan: Plan, sandbox: LocalSandbox, preload: Sequence[str]) -> dict[str, object]:
    return guest_config(
        plan.spec,
        token=sandbox.endpoint.token,
        connections_max=CHAIN_LENGTH,
        memory_bytes=plan.spec.memory_bytes,
        watch_memory=not plan.resources.limits_memory,
        preload=preload,
        has_environment=have_environment(plan.mounts),
    )
