"""The checker's process: reads sources from the supervisor, one after the other, and answers each with a verdict.

It parses and compiles, under limits of its own. A hostile source can break this process and nothing else: the
supervisor notices, starts another one, and refuses that one execution.
"""

from __future__ import annotations

import os
import resource

from ..wire import link
from ..wire.frames import FrameError
from ..wire.lean import dumps
from ..wire.link_messages import Check, RefusedSource, Verdict, message_of
from ..wire.proc import own_bytes
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
"""A program whose check uses most of the checker."""
_is_prepared = False


def prepare(source: str = "0", times: int = 1) -> None:
    """Triggers Python's lazy initialization, once in this process or in the one that it was forked from.

    After several checks of PROGRAM, Python has specialized the code in place, and later forks copy fewer pages. In a
    process that forks no checker this would only take memory.
    """
    global _is_prepared
    for _ in range(0 if _is_prepared else times):
        check(source, "<warm-up>", rules=Rules(), output_mode="trailing_expression", sentinels=Sentinels("warm-up"))
    _is_prepared = True


def checker_main(sock: socket.socket, config: Any) -> None:
    """Serves the supervisor until it closes the link. Runs in the forked child."""
    os.setsid()
    # RLIMIT_DATA also counts what a template process loaded before the fork.
    memory = own_bytes(b"VmData:") + config.checker_memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    sentinels = Sentinels(config.mark)
    sent, rules = b"", Rules()  # kept: nearly all requests have the same rules
    while True:
        try:
            packet = link.receive(sock, _MAX_REQUEST_BYTES)
        except link.LinkClosed:
            return
        request, body = message_of(packet), link.read_body(packet)
        if not isinstance(request, Check) or request.rules > len(body):
            raise FrameError("not a source to check")  # our own bug: agent code has no access to the supervisor's end
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
