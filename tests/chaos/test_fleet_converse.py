"""One stream for a session's executions in a fleet: at the node it lives as long as the lease, and a front has none."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2, status_pb2

from executor_api.v1 import executor_service_pb2 as service_pb
from executor_api.v1 import executor_service_pb2_grpc as service_grpc
from tests.chaos.witness import Witness
from tests.support.backends import require
from tests.support.machines import Fleet, fleet, new_id
from tests.support.polling import eventually

WAIT_S = 60.0


@contextmanager
def machines_of(front_config: str = "") -> Iterator[Fleet]:
    require("local")
    directory = Path(tempfile.mkdtemp(prefix="d-"))
    with fleet(directory, "n1", front_config=front_config) as made:
        yield made
    shutil.rmtree(directory)


class Stream:
    """A stream to one address; `execute` returns the id of its message."""

    def __init__(self, stack: ExitStack, address: str, token: str, session_id: str) -> None:
        channel = stack.enter_context(grpc.insecure_channel(address))
        self._requests: SimpleQueue[service_pb.ConverseRequest | None] = SimpleQueue()
        self._session_id = session_id
        self._sent = 0
        metadata = (("authorization", f"Bearer {token}"),)
        stub = service_grpc.ExecutorServiceStub(channel)
        self.call = stub.Converse(iter(self._requests.get, None), metadata=metadata)
        stack.callback(self._requests.put, None)
        stack.callback(self.call.cancel)

    def execute(self, code: str) -> None:
        self._sent += 1
        request = service_pb.ExecuteRequest(session_id=self._session_id, execution_id=new_id(), code=code)
        self._requests.put(service_pb.ConverseRequest(message_id=self._sent, execute=request))

    def result(self) -> str:
        """Reads on to the result of an execution; returns what it has printed."""
        said = ""
        for response in self.call:
            for event in response.events:
                said += str(event.log.text)
                if event.WhichOneof("kind") == "result":
                    return said
        raise AssertionError("the stream ended")

    def refusal(self) -> tuple[str, str]:
        """Reads on to a refusal, of a message or of the stream; returns its code and its reason."""
        try:
            for response in self.call:
                if response.HasField("refusal"):
                    return code_pb2.Code.Name(response.refusal.code), _reason_in(response.refusal.details)
        except grpc.RpcError:
            return self.call.code().name, _reason_of(self.call)
        raise AssertionError("the stream ended well")


def _reason_of(call: grpc.Call) -> str:
    """Returns the reason of our own refusals; that of gRPC's has none."""
    packed = dict(call.trailing_metadata() or ()).get("grpc-status-details-bin")
    return _reason_in(status_pb2.Status.FromString(packed).details) if isinstance(packed, bytes) else ""


def _reason_in(details: Iterable[Any]) -> str:
    info = error_details_pb2.ErrorInfo()
    return next((str(info.reason) for detail in details if detail.Unpack(info)), "")


def test_a_stream_to_a_node_ends_with_its_lease_and_begins_nothing_after_it() -> None:
    with machines_of() as machines, machines.client() as client, ExitStack() as stack:
        node = machines.nodes["n1"]
        session = client.create_session()
        stream = Stream(stack, node.clients_address, machines.token, session.session_id)
        for number in range(3):
            stream.execute(f"print({number})")
            assert stream.result() == f"{number}\n"
        from_front = stack.enter_context(Witness(machines.front.address, machines.token, session.session_id))
        stream.execute("print('on', flush=True)\nwhile True: pass")
        node.link.unplug()
        assert stream.refusal() == ("UNAVAILABLE", "NODE_FENCED")
        ended_at_s = time.monotonic()
        assert eventually(lambda: from_front.lost_at_s is not None, timeout_s=WAIT_S), from_front.answers
        assert from_front.lost_at_s is not None and ended_at_s < from_front.lost_at_s
        late = Stream(stack, node.clients_address, machines.token, session.session_id)
        late.execute("print('late')")
        assert late.refusal()[0] == "UNAVAILABLE"
        node.plug_in()
        machines.wait_serving("n1")
        late = Stream(stack, node.clients_address, machines.token, session.session_id)
        late.execute("print('late')")
        assert late.refusal() == ("FAILED_PRECONDITION", "SESSION_LOST")


@pytest.mark.parametrize(
    ("proxy", "refused"), [(False, ("FAILED_PRECONDITION", "NODE_ELSEWHERE")), (True, ("UNIMPLEMENTED", ""))]
)
def test_a_front_sends_a_stream_elsewhere_or_to_the_plain_calls(proxy: bool, refused: tuple[str, str]) -> None:
    with machines_of(f"proxy = {str(proxy).lower()}\n") as machines, machines.client() as client, ExitStack() as stack:
        session = client.create_session()
        stream = Stream(stack, machines.front.address, machines.token, session.session_id)
        stream.execute("1")
        assert stream.refusal() == refused
        assert session.execute("6 * 7").output == 42
        session.close()
