"""`executor top` asks for the daemon's state only if it may."""

from __future__ import annotations

from typing import Any

from executor_client.cli.top import _Status
from executor_client.errors import AuthorizationError


class _Refusing:
    """A client whose calls are all refused, and counted."""

    def __init__(self) -> None:
        self.calls = 0
        self._transport = self

    def once(self, _request: object, _time_s: float) -> None:
        self.calls += 1
        raise AuthorizationError("this call is for admins")


def test_a_viewer_is_refused_the_state_once() -> None:
    """Each refusal is a record of the audit log: a viewer's `executor top` wrote one each second."""
    client: Any = _Refusing()
    status = _Status(client)
    assert [status.read(), status.read(), client.calls] == [None, None, 1]
