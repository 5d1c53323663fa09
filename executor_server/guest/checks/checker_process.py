"""The checker's process: reads one source after the other from the supervisor and answers with a verdict.

Only parsing and compiling happens here, under limits of its own, so this process is all that a hostile source can
break: the supervisor notices, starts another, and refuses that one execution.
"""

from __future__ import annotations

import os
import resource

from ..wire import link
from ..wire.frames import FrameError
from ..wire.lean import dumps
from ..wire.link_messages import Check, RefusedSource, Verdict, message_of
from ..wire.schema import read_object
from ..wire.session_rules import CodeRules
from .checker import check
from .rules import Rules
from .sentinels import Sentinels

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from typing import Any

_MAX_REQUEST_BYTES = 64 * 1024 * 1024


PROGRAM = """
import math
total = [math.sqrt(n) for n in range(3) if n]
for n in total:
    try:
        print(f"{n}", len(total), total[0].real)
    except ValueError:
        pass
def double(x): return x + x
double(1)
"""
"""Uses most of what a check does."""
_is_prepared = False


def prepare(source: str = "0", times: int = 1) -> None:
    """Has Python make its lazy preparations, unless it has in this process or in the one that it was forked from.

    With a program that uses most of a check, some times over, Python specializes the code, too, in place: a fork after
    that copies fewer pages. In a process that forks no checker that would only take memory.
    """
    global _is_prepared
    for _ in range(0 if _is_prepared else times):
        check(source, "<warm-up>", rules=Rules(), output_mode="trailing_expression", sentinels=Sentinels("warm-up"))
    _is_prepared = True


def checker_main(sock: socket.socket, config: Any) -> None:
    """Serves the supervisor until it closes the link. Runs in the forked child."""
    os.setsid()
    memory = config.checker_memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    sentinels = Sentinels(config.mark)
    sent, rules = b"", Rules()  # kept, as nearly all requests have the same
    while True:
        try:
            packet = link.receive(sock, _MAX_REQUEST_BYTES)
        except link.LinkClosed:
            return
        request, body = message_of(packet), link.read_body(packet)
        if not isinstance(request, Check) or request.rules > len(body):
            raise FrameError("not a source to check")  # a bug of ours: the supervisor's end is not agent code's
        if body[: request.rules] != sent:
            sent = body[: request.rules]
            rules = Rules.of(read_object(CodeRules, sent, "rules"))
        source = body[request.rules :].decode("utf-8", "surrogatepass")
        checked = check(
            source,
            request.filename,
            rules=rules,
            output_mode=request.mode,
            sentinels=sentinels,
            directories=(config.workspace, "/tmp"),
        )
        verdict = Verdict(ok=checked.code is not None, imports=list(checked.imports))
        if checked.code is not None:
            link.send(sock, verdict, checked.code)
        else:
            assert checked.error is not None
            link.send(sock, verdict, dumps(RefusedSource(outcome=checked.outcome, error=checked.error).head()))
