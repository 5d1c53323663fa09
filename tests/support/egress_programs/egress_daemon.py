"""A daemon with nothing but an egress service: prints the proxy's process, and waits to be killed."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from executor_server.network.egress import EgressService, EgressSettings


async def main(directory: Path) -> None:
    service = EgressService(EgressSettings(), directory)
    await service.prepare()
    sys.stdout.write(f"{service.pid}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().create_future()


asyncio.run(main(Path(sys.argv[1])))
