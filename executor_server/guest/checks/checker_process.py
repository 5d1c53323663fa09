"""The checker's process: reads one source after the other from the supervisor and answers with a verdict.

Only parsing and compiling happens here, under limits of its own, so this process is all that a hostile source can
break: the supervisor notices, starts another, and refuses that one execution.
"""

from __future__ import annotations

import os
import resource

from ..wire import link
from ..wire.frames import Fields
from ..wire.lean import dumps, loads
from ..wire.session_rules import CodeRules
from .checker import check
from .instrumentation import Sentinels
from .rules import Rules

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

_MEMORY_BYTES = 1024 * 1024 * 1024
_MAX_REQUEST_BYTES = 64 * 1024 * 1024


def checker_main(sock: socket.socket, config: Any) -> None:
    """Serves the supervisor until it closes the link. Runs in the forked child."""
    os.setsid()
    memory = min(_MEMORY_BYTES, config.memory_bytes // 2)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sentinels = Sentinels(config.mark)
    # Makes Python's lazy preparations now, while no client waits.
    check("0", "<warm-up>", rules=Rules(), output_mode="trailing_expression", sentinels=sentinels)
    sent, rules = Rules().fields(), Rules()  # kept, as nearly all requests have the same
    while True:
        try:
            message = link.receive(sock, _MAX_REQUEST_BYTES)
        except link.LinkClosed:
            return
        body = link.read_body(message)
        size = message.head.integer("head")
        request = loads(body[:size])
        if request["rules"] != sent:
            sent, rules = request["rules"], Rules.of(CodeRules.read(Fields(request["rules"])))
        verdict = check(
            body[size:].decode("utf-8", "surrogatepass"),
            request["filename"],
            rules=rules,
            output_mode=request["mode"],
            sentinels=sentinels,
        )
        if verdict.code is not None:
            link.send(sock, {"t": "verdict", "ok": True, "imports": list(verdict.imports)}, verdict.code)
        else:
            refusal = {"outcome": verdict.outcome, "error": verdict.error}
            link.send(sock, {"t": "verdict", "ok": False, "imports": list(verdict.imports)}, dumps(refusal))
