"""The number of machines that a fleet asks Ray's autoscaler for: more while requests wait for a place, else none."""

from __future__ import annotations

from dataclasses import dataclass

MAX_MORE_NODES = 8
"""Nodes to ask for at a time beyond those that there are."""
HOLD_S = 120.0
"""Seconds for which the request stands after nothing waited any more. A parked request waits for seconds, and a machine
takes a minute or two to come: withdrawn at once, the request would never be met."""


@dataclass
class Scaling:
    """Takes the time as an argument. Its answer is a total: Ray's autoscaler counts the nodes that are there too."""

    wanted: int = 0
    until_s: float = 0.0

    def decide(self, now_s: float, *, parked: int, nodes: int, places: int) -> int:
        """Returns the number of nodes to ask for; 0: none. `places` are the sessions that one node may have."""
        if parked > 0:
            more = min(-(-parked // max(1, places)), MAX_MORE_NODES)
            self.wanted, self.until_s = max(self.wanted, nodes + more), now_s + HOLD_S
        elif now_s >= self.until_s or nodes >= self.wanted:
            self.wanted = 0
        return self.wanted
