"""The asyncio side of the client's transport: what needs an event loop.

Owns the channel and its streams, host tools as tasks, the timers that report waits, and the primitives of `runtime`.
`make unasync` writes the blocking `transport` from the one here, as it does for the client itself. Each other module
has a handwritten counterpart in `_sync`, with the same names without "Async"; these hold all the differences between
the two clients.

Must not know `_sync`, nor the clients and sessions above it.
"""

from executor_client._aio.channel import AsyncChannel, AsyncEventStream
from executor_client._aio.runtime import (
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
from executor_client._aio.tool_calls import AsyncToolCalls, AsyncToolPool
from executor_client._aio.transport import AsyncTransport
