"""The blocking side of the client's transport, on blocking gRPC: no event loop, and no thread for a plain call.

Owns what needs threads: the channel and its streams, host tools on a bounded pool, the thread that reports waits, the
primitives of `runtime`, and the threads that renew a client's lease and answer its
approvals, which serve the asyncio client too.
`transport` is generated from the one in `_aio`.

Must not know `_aio`, nor the clients and sessions above it.
"""

from executor_client._sync.channel import EventStream
from executor_client._sync.lease import ClientLease
from executor_client._sync.runtime import (
    Background,
    Lock,
    OnEvent,
    OnOutput,
    blocking_items,
    notify,
    off_loop,
    on_disk,
    run_blocking,
    shielded,
    sleep,
    wait_for,
)
from executor_client._sync.tool_calls import ToolCalls, ToolPool
from executor_client._sync.transport import Transport
