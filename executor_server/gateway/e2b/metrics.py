"""One measurement of a sandbox: a short process in it reads what its processes use at this moment."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from executor_client.aio_session import AsyncSession
from executor_server.gateway.errors import Refusal

TIMEOUT_S = 10.0
OUTPUT_BYTES_MAX = 1024
_NUMBER_MAX = 2**53
# CPU seconds of all processes so far, their memory, the files of the workspace, and the CPUs.
_PROGRAM = """\
import glob, json, os
ticks = pages = 0
for stat in glob.glob("/proc/[0-9]*/stat"):
    try:
        with open(stat) as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        continue
    ticks += int(fields[11]) + int(fields[12])
    pages += int(fields[21])
disk = os.statvfs(".")
print(json.dumps([
    ticks / os.sysconf("SC_CLK_TCK"),
    pages * os.sysconf("SC_PAGE_SIZE"),
    (disk.f_blocks - disk.f_bfree) * disk.f_frsize,
    len(os.sched_getaffinity(0)),
]))
"""


async def sample(session: AsyncSession, create_time: float) -> dict[str, Any]:
    """Returns an entry of the list of metrics. CPU usage is the average since the sandbox was created.

    Raises Refusal, and the client's errors.
    """
    done = await session.processes.run(
        ["python3", "-I", "-S", "-c", _PROGRAM], timeout_s=TIMEOUT_S, max_output_bytes=OUTPUT_BYTES_MAX
    )
    try:
        cpu_s, memory, disk, cpus = (_checked(each) for each in json.loads(done.stdout))
    except (ValueError, TypeError, RecursionError):
        raise Refusal(503, "the sandbox did not answer a measurement") from None
    now = time.time()
    limits = session.info.limits
    return {
        "timestamp": datetime.fromtimestamp(now, UTC).isoformat().replace("+00:00", "Z"),
        "timestampUnix": int(now),
        "cpuCount": int(cpus),
        "cpuUsedPct": round(100 * cpu_s / max(now - create_time, 1.0), 2),
        "memUsed": int(memory),
        "memTotal": limits.memory_bytes or 0,
        "memCache": 0,
        "diskUsed": int(disk),
        "diskTotal": limits.disk_bytes or 0,
    }


def _checked(value: object) -> float:
    """A sandbox can print anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _NUMBER_MAX:
        raise ValueError
    return value
