"""Bounds the memory of single answers that their callers don't read.

grpc.aio takes an answer as a whole, and keeps it until the caller has taken it or has left. A stream waits with each
message instead, so it never has more than one. Each call may have one small answer unsent: with 1,024 calls at a time,
64 MiB for all tenants. Larger answers are counted for their tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, cast

from executor_server.api.auth import current_principal
from executor_server.api.handlers import Context, Handler, behaviour_of, with_behaviour
from executor_server.core import Reason, ResourceExhausted

SMALL_BYTES = 64 * 2**10
"""Size up to which an answer is always sent: the number of calls bounds these."""
MAX_UNSENT_BYTES = 64 * 2**20
"""Bytes of one tenant's larger answers that are not sent yet; the largest answer that a client of ours takes."""
RETRY_S = 1.0


class UnsentAnswers:
    """Counts the bytes of answers that are being sent, by tenant."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def around(self, method: str, handler: Handler) -> Handler:
        """Returns a handler that raises ResourceExhausted in place of an answer that would be too much."""
        if handler.response_streaming:
            return handler
        behaviour = behaviour_of(handler)

        async def bounded(request: Any, context: Context) -> Any:
            answer = await behaviour(request, context)
            size_bytes = len(answer) if isinstance(answer, bytes) else answer.ByteSize()
            if size_bytes > SMALL_BYTES:
                self._count(size_bytes)
            return answer

        return with_behaviour(handler, bounded, handler.request_deserializer)

    def _count(self, size_bytes: int) -> None:
        """Counts an answer until the task of its call ends, which is when it has been sent."""
        tenant = current_principal.get().tenant
        if self._bytes[tenant] + size_bytes > MAX_UNSENT_BYTES:
            text = (
                f"the call was carried out, but its answer of {size_bytes:,} bytes is not sent: the answers of this "
                f"tenant that were not read yet may have {MAX_UNSENT_BYTES:,} bytes together; read or cancel the calls "
                "that are open, and try again"
            )
            raise ResourceExhausted(Reason.QUEUE_FULL, text, retry_after_s=RETRY_S)
        self._bytes[tenant] += size_bytes

        def sent(_task: object) -> None:
            self._bytes[tenant] -= size_bytes
            if not self._bytes[tenant]:
                del self._bytes[tenant]

        cast("asyncio.Task[Any]", asyncio.current_task()).add_done_callback(sent)
