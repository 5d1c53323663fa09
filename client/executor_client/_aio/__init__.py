"""The asyncio side of the client's transport: what needs an event loop.

Owns the channel and its streams, host tools as tasks, the timers that report waits, and the primitives of `runtime`.
`transport` and `session_transport`, like the asyncio client itself, are written once: `make unasync` writes the
blocking ones from them. The other modules each have a counterpart in `_sync`, written by hand, with the same names less
their "Async": all that differs between the two clients is in them.

Must not know `_sync`, nor the clients and sessions above it.
"""

from executor_client._aio.channel import AsyncEventStream
from executor_client._aio.runtime import (
    Beside,
    Lock,
    OnEvent,
    OnOutput,
    blocking_items,
    notify,
    run_blocking,
    sleep,
    wait_for,
)
from executor_client._aio.session_transport import AsyncSessionTransport
from executor_client._aio.tool_calls import AsyncToolCalls, AsyncToolPool
from executor_client._aio.transport import AsyncTransport
