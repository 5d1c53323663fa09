"""The cost of an execution in addition to the program that it runs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import grpc

from benchmarks.bench import Bench
from benchmarks.echo import Echo
from benchmarks.figures import AtMostTimes, Figure, Reference, timed
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc
from executor_client import ExecutionEvent, LogEvent, Session

_ROUNDS = 300
_LINES = 1_000
_LINES_ROUNDS = 20
_LINE_EVENT_BYTES = 60


def execute(bench: Bench) -> Iterator[Figure]:
    """`1+1`, over each transport, compared with a stream of one message of the same size."""
    with bench.local.cold_session() as session, bench.local.daemon.client(bench.local.daemon.tcp_address) as tcp_client:
        request_bytes, response_bytes = _sizes(bench, session.session_id)
        tcp_session = tcp_client.get_session(session.session_id)

        def echoed(echo: Echo) -> float:
            return timed(lambda: list(echo.stream(request_bytes, 1, response_bytes)))

        unix_ms, unix_echo_ms, tcp_ms, tcp_echo_ms = bench.in_turns(
            _ROUNDS,
            lambda: timed(lambda: _add(session)),
            lambda: echoed(bench.echo),
            lambda: timed(lambda: _add(tcp_session)),
            lambda: echoed(bench.tcp_echo),
        )
    yield Figure("execute 1+1, Unix socket", "ms", unix_ms, Reference("echo, stream", unix_echo_ms), AtMostTimes(2))
    yield Figure("execute 1+1, TCP", "ms", tcp_ms, Reference("echo, stream", tcp_echo_ms), AtMostTimes(2))


def _add(session: Session) -> None:
    assert session.execute("1+1").output == 2


def _sizes(bench: Bench, session_id: str) -> tuple[int, int]:
    """Bytes of the request and of the one response of such an execution, metadata left out."""
    request = pb.ExecuteRequest(session_id=session_id, execution_id="size", code="1+1")
    with grpc.insecure_channel(bench.local.daemon.unix_address) as channel:
        stub = executor_service_pb2_grpc.ExecutorServiceStub(channel)
        responses = list(stub.Execute(request, metadata=[("authorization", f"Bearer {bench.local.daemon.token}")]))
    return request.ByteSize(), sum(response.ByteSize() for response in responses)


def printed_lines(bench: Bench) -> Iterator[Figure]:
    """Until the caller has the first of 1,000 lines, and all; compared with as many messages of the echo."""
    program = f"for number in range({_LINES}):\n    print('line', number)"
    first: dict[str, list[float]] = {"ours": [], "echo": []}

    with bench.local.cold_session() as session:

        def ours() -> float:
            events: list[float] = []

            def on_event(event: ExecutionEvent) -> None:
                if not events and isinstance(event, LogEvent):
                    events.append(time.perf_counter())

            start = time.perf_counter()
            result = session.execute(program, on_event=on_event)
            took = (time.perf_counter() - start) * 1000
            assert result.logs.count("\n") == _LINES
            first["ours"].append((events[0] - start) * 1000)
            return took

        def echoed() -> float:
            start = time.perf_counter()
            messages = iter(bench.echo.stream(100, _LINES, _LINE_EVENT_BYTES))
            next(messages)
            first["echo"].append((time.perf_counter() - start) * 1000)
            for _ in messages:
                pass
            return (time.perf_counter() - start) * 1000

        all_ms, all_echo_ms, add_ms = bench.in_turns(_LINES_ROUNDS, ours, echoed, lambda: timed(lambda: _add(session)))
    first_ms, first_echo_ms = (tuple(first[side][-len(all_ms) :]) for side in ("ours", "echo"))
    yield Figure("first of 1,000 lines", "ms", first_ms, Reference("execute 1+1", add_ms), AtMostTimes(1.2))
    yield Figure(
        "first of 1,000 lines, beside the echo", "ms", first_ms, Reference("echo, first of 1,000", first_echo_ms)
    )
    yield Figure("last of 1,000 lines", "ms", all_ms, Reference("echo, 1,000 messages", all_echo_ms))
