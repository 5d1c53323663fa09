"""The tokens that this daemon shows one guest: the next of a finite chain with each connection, none of them twice."""

from __future__ import annotations

from functools import lru_cache

from executor_server.backends.channel.endpoint import GuestEndpoint
from executor_server.core import SandboxFailure
from executor_server.guest.wire.tokens import chained

# A sandbox that is made needs its chain twice: for what its guest knows, and at the first connection.
_CHAINS_KNOWN = 32


@lru_cache(maxsize=_CHAINS_KNOWN)
def first_token(secret: bytes, chain_length: int) -> bytes:
    """Returns the token that is shown first; hashed once more, it is what the guest knows."""
    return chained(secret, chain_length - 1)


class Tokens:
    """The chain of one guest, and the position in it."""

    def __init__(self, endpoint: GuestEndpoint, shown: int) -> None:
        """`shown` is the number of tokens that earlier daemons may have shown."""
        self._endpoint = endpoint
        self.shown = shown

    def next(self) -> str:
        """Returns the next token, which counts as shown from here on. Raises SandboxFailure when none is left."""
        chain_length = self._endpoint.connections_max
        self.shown += 1
        if self.shown >= chain_length:
            raise SandboxFailure("the guest has been connected to too often")
        if self.shown == 1:
            return first_token(self._endpoint.token, chain_length).hex()
        return chained(self._endpoint.token, chain_length - self.shown).hex()
