"""Facts of sandboxes as their code sees them: of one that bubblewrap made, and of two that one template process forked.

A program of its own, so that an ordinary user can run it where the tests run as root: `python -m tests.security.two_ways
DIRECTORY PYTHON` prints {"bubblewrap": FACTS, "forked": [FACTS, FACTS], "beside a full one": EXIT CODE} as JSON. The two
forked sandboxes exist at the same time. The exit code is that of a process in a sandbox whose sibling has nearly as many
threads as it may have.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from executor_server.backends.local import LocalBackend
from executor_server.backends.local.system import GUARANTEED_TOOLS
from executor_server.core.config import LocalImage
from tests.contract.harness import Harness
from tests.support.forked_backend import ForkedBackend

MEMORY_BYTES = 2**30
PROCESSES = 32

FILL = """
import threading
stop = threading.Event()
for _ in range(24):
    threading.Thread(target=stop.wait, daemon=True).start()
"""
BESIDE = """
import subprocess
subprocess.run(["true"]).returncode
"""

FACTS = r"""
import ctypes, gc, hashlib, json, os, random, re, resource, secrets, shutil, signal, socket, ssl, stat, subprocess, sys, tempfile, uuid
libc = ctypes.CDLL(None)
def lines(path):
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError as error:
        return [type(error).__name__]
status = dict(line.split(":\t", 1) for line in lines("/proc/self/status") if ":\t" in line)
mounts = []
for line in lines("/proc/self/mountinfo"):
    before, after = line.split(" - ")
    fields = before.split(" ")
    mounts.append([fields[4], sorted(set(fields[5].split(",")) - {"relatime"}), after.split(" ")[0]])
descriptors = {}
for name in os.listdir("/proc/self/fd"):
    try:
        descriptors[name] = re.sub(r"\[\d+\]|\d+", "", os.readlink("/proc/self/fd/" + name))
    except OSError:
        pass
def tried(act):
    try:
        return str(act())
    except OSError as error:
        return type(error).__name__
def writable(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
        return True
    except OSError:
        return False
try:
    import numpy
    numbers = numpy.random.rand(4).tolist()
    rng = numpy.random.default_rng().random()
except ImportError:
    numbers = rng = None
def states():
    # Of every generator of random numbers in this process, and each key that was made up when a module was imported.
    gc.unfreeze()
    found = []
    for each in gc.get_objects():
        kind = type(each)
        if random.Random in kind.__mro__ and kind is not random.SystemRandom:
            found.append(each.getstate())
        elif str(kind.__module__).startswith("numpy.random") and hasattr(kind, "state"):
            found.append(each.state)
    if "multiprocessing.process" in sys.modules:
        found.append(bytes(sys.modules["multiprocessing.process"].current_process().authkey))
    return [hashlib.sha256(repr(each).encode()).hexdigest() for each in found]
facts = {
    "status": {key: " ".join(status[key].split()) for key in ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd",
        "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "SigBlk", "SigIgn", "SigCgt", "ShdPnd", "Threads", "Umask",
        "THP_enabled", "Speculation_Store_Bypass", "SpeculationIndirectBranch") if key in status},
    "uid_map": [line.split() for line in lines("/proc/self/uid_map")],
    "gid_map": [line.split() for line in lines("/proc/self/gid_map")],
    "setgroups": lines("/proc/self/setgroups"),
    "rlimits": {name: list(resource.getrlimit(getattr(resource, name))) for name in dir(resource) if name.startswith("RLIMIT_")},
    "descriptors": descriptors,
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in sorted(os.listdir("/proc/self/ns"))},
    "mounts": sorted(mounts),
    "environment": dict(os.environ),
    "initial environment": sorted(entry.split("=")[0] for entry in lines("/proc/self/environ")[0].split("\0") if entry),
    "host name": socket.gethostname(),
    "place": [os.getcwd(), os.getppid(), os.getsid(0) == os.getpid(), os.getpriority(os.PRIO_PROCESS, 0), sys.executable,
        sys.path, sys.argv, sys.flags.isolated],
    "processes": sorted(name for name in os.listdir("/proc") if name.isdigit())[:1],
    "supervisor": [tried(lambda: os.readlink("/proc/1/exe")), tried(lambda: open("/proc/1/environ").read()),
        tried(lambda: open("/proc/1/mem", "rb").read(1)), tried(lambda: os.kill(1, 0))],
    "prctl": {name: libc.prctl(number, 0, 0, 0, 0) for name, number in {"dumpable": 3, "keepcaps": 7, "securebits": 27, "timer slack": 30,
        "no new privileges": 39, "seccomp": 21}.items()},
    "adjustment": lines("/proc/self/oom_score_adj"),
    "scheduling": [os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))],
    "groups": lines("/proc/self/cgroup"),
    "interfaces": [line.split(":")[0].strip() for line in lines("/proc/net/dev")[2:]],
    "loopback": tried(lambda: socket.create_server(("127.0.0.1", 0)).close()),
    "abstract sockets": sum("@" in line for line in lines("/proc/net/unix")),
    "writable in proc": [path for path in ("/proc/1/oom_score_adj", "/proc/1/comm", "/proc/1/coredump_filter", "/proc/1/task/1/oom_score_adj", "/proc/1/clear_refs",
        "/proc/1/sched", "/proc/sys/kernel/hostname", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv4/ping_group_range",
        "/proc/sysrq-trigger", "/proc/sys/vm/overcommit_memory", "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/shmmax") if writable(path)],
    "root": sorted(os.listdir("/")),
    "devices": sorted(os.listdir("/dev")),
    "modes": {path: [oct(os.stat(path).st_mode), os.stat(path).st_dev == os.stat("/").st_dev] for path in
        ("/", "/workspace", "/tmp", "/dev", "/dev/shm", "/dev/pts", "/proc", "/etc", "/usr/bin", "/run", "/run/executor")},
    "sizes": {path: [os.statvfs(path).f_blocks * os.statvfs(path).f_frsize, os.statvfs(path).f_files] for path in ("/workspace", "/tmp", "/dev/shm")},
    "in tmp": sorted(os.listdir("/tmp")), "in workspace": sorted(os.listdir("/workspace")), "in shm": sorted(os.listdir("/dev/shm")),
    "file systems": {path: os.stat(path).st_dev for path in ("/workspace", "/tmp", "/dev/shm", "/dev/pts", "/proc")},
    "shared memory": [line for line in lines("/proc/self/maps") if line.split()[1][1] == "w" and line.split()[1][3] == "s"],
    "ipc": [line for line in lines("/proc/sysvipc/shm")[1:]],
    "machine": {
        "missing tools": [tool for tool in TOOLS if not os.access(f"/usr/bin/{tool}", os.X_OK)],
        "ps": subprocess.run(["setsid", "ps", "-e", "-o", "user=", "-o", "comm="], capture_output=True, text=True).stdout.split(),
        "os-release": lines("/etc/os-release") == lines("/usr/lib/os-release"),
        "host name": lines("/etc/hostname"),
        "same": os.path.samefile("/tmp", "/var/tmp"),
        "home": os.path.samefile("/workspace", "/home/user"),
        "own": [os.stat("/workspace").st_uid, os.path.expanduser("~")],
    },
    "modules": sorted(name for name in ("ctypes", "socket") if name in sys.modules),
}
random_state = {
    "random": random.random(), "numpy": numbers, "generator": rng, "secrets": secrets.token_hex(8), "uuid1": uuid.uuid1().hex,
    "uuid1 node": uuid.uuid1().node, "uuid4": uuid.uuid4().hex, "temporary name": next(tempfile._get_candidate_names()),
    "ssl": ssl.RAND_bytes(8).hex(), "urandom": os.urandom(8).hex(), "mark": hashlib.md5(repr(os.times()).encode()).hexdigest(),
}
facts["states"] = states()
(json.dumps(facts), json.dumps(random_state))
"""


async def _facts(harness: Harness, memory_bytes: int) -> dict[str, Any]:
    session = await harness.session(memory_bytes=memory_bytes)
    ran = await harness.run(session, f"TOOLS = {sorted(GUARANTEED_TOOLS)}\n{FACTS}")
    assert ran.outcome == "succeeded", ran.message
    facts, random_state = (json.loads(text) for text in ran.output)
    return {**facts, "random": random_state}


async def _beside_a_full_one(harness: Harness) -> Any:
    full, beside = [await harness.session(memory_bytes=MEMORY_BYTES, processes=PROCESSES) for _ in range(2)]
    filled = await harness.run(full, FILL)
    assert filled.outcome == "succeeded", filled.message
    ran = await harness.run(beside, BESIDE)
    return ran.output if ran.outcome == "succeeded" else ran.message


async def _main(directory: Path, python: str) -> dict[str, Any]:
    images = {"base": LocalImage(python=Path(python))}
    async with Harness(LocalBackend(directory / "a", images)) as harness:
        bubblewrap = await _facts(harness, MEMORY_BYTES)
    async with Harness(ForkedBackend(directory / "b", images)) as harness:
        forked = [await _facts(harness, MEMORY_BYTES) for _ in range(2)]
        beside = await _beside_a_full_one(harness)
    return {"bubblewrap": bubblewrap, "forked": forked, "beside a full one": beside}


def main() -> None:
    directory, python = Path(sys.argv[1]), sys.argv[2]
    with redirect_stdout(sys.stderr):
        answer = asyncio.run(_main(directory, python))
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
