"""The proxy's process with a mistake: no address can be classified."""

from __future__ import annotations

import sys

from executor_server.guest.egress.own_addresses import OwnAddresses
from executor_server.network.proxy import server


def fail(_: OwnAddresses) -> frozenset[object]:
    raise LookupError("text of a sandbox")


OwnAddresses.__call__ = fail  # type: ignore[method-assign,assignment]
sys.exit(server.serve(int(sys.argv[1])))
