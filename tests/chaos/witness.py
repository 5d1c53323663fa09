"""Watchers of a session in a fleet: when it was last served, and when its front first said that it is lost.

Each asks over a connection of its own, again and again, as close together as the answers come. The times are those of
one clock: a served answer counts from the moment of its request, and a loss from the moment of its answer.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

import grpc

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from executor_api.v1 import types_pb2 as pb

_INTERVAL_S = 0.02
_CALL_TIMEOUT_S = 1.0


class Witness:
    """Asks one address for one session until the end of the block."""

    def __init__(self, address: str, token: str, session_id: str) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {token}"),)
        self._request = service_pb.GetSessionRequest(session_id=session_id)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.served_at_s = 0.0
        """The time at which the last answer was asked for that showed the session alive."""
        self.lost_at_s: float | None = None
        """The time at which the session was first said to be lost."""
        self.lost_reason = ""
        self.answers: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _ask(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 200)]
        with grpc.insecure_channel(self._address, options=options) as channel:
            stub = service_grpc.ExecutorServiceStub(channel)
            while not self._ended.is_set():
                self._ask_once(stub)
                self._ended.wait(_INTERVAL_S)

    def _ask_once(self, stub: service_grpc.ExecutorServiceStub) -> None:
        asked_s = time.monotonic()
        try:
            answer = stub.GetSession(self._request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.RpcError as error:
            self.answers[error.code().name] += 1
            return
        state = pb.SessionState.Name(answer.session.state).removeprefix("SESSION_STATE_")
        self.answers[state] += 1
        if answer.session.state != pb.SESSION_STATE_LOST:
            self.served_at_s = asked_s
        elif self.lost_at_s is None:
            self.lost_at_s, self.lost_reason = time.monotonic(), answer.session.lost_reason
