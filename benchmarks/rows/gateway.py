"""The cost of the gateway: E2B's SDK compared with our client, and Connect compared with gRPC."""

from __future__ import annotations

import itertools
import json
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import grpc
from connectrpc.client import ConnectClientSync
from connectrpc.codec import Codec
from connectrpc.compat import google_protobuf_binary_codec, google_protobuf_json_codec
from connectrpc.method import IdempotencyLevel, MethodInfo
from e2b_code_interpreter import Sandbox

from benchmarks.bench import Bench
from benchmarks.figures import AtMost, AtMostTimes, Figure, Reference, timed
from benchmarks.rows.sessions import warm_session
from executor_api.v1 import executor_service_pb2 as pb
from executor_api.v1 import executor_service_pb2_grpc

_ROUNDS = 100
_CREATIONS = 25
_FILES = 10
# Time for the pool to make another sandbox.
_REFILL_S = 0.2
_FILE_BYTES = 50_000_000
_CONNECT_ROUNDS = 300
_RUN_ROUNDS = 40
_EXECUTE = MethodInfo(
    name="Execute",
    service_name="executor_api.v1.ExecutorService",
    input=pb.ExecuteRequest,
    output=pb.ExecuteResponse,
    idempotency_level=IdempotencyLevel.UNKNOWN,
)


def e2b(bench: Bench) -> Iterator[Figure]:
    """A sandbox from the pool, a step, a command, and a file there and back."""
    access = {"api_key": bench.local.daemon.token, "api_url": bench.gateway, "sandbox_url": bench.gateway}

    def created() -> float:
        time.sleep(_REFILL_S)
        start = time.perf_counter()
        sandbox = Sandbox.create("base", **access)
        took_ms = (time.perf_counter() - start) * 1000
        sandbox.kill()
        return took_ms

    created_ms, warm_ms = bench.in_turns(_CREATIONS, created, lambda: warm_session(bench.local.client, _REFILL_S))
    yield Figure("E2B: create", "ms", created_ms, Reference("session ready, warm", warm_ms), AtMost(20))

    sandbox = Sandbox.create("base", **access)
    try:
        with bench.local.cold_session() as session:
            code_ms, execute_ms, command_ms, process_ms = bench.in_turns(
                _ROUNDS,
                lambda: timed(lambda: sandbox.run_code("1+1")),
                lambda: timed(lambda: session.execute("1+1")),
                lambda: timed(lambda: sandbox.commands.run("true")),
                lambda: timed(lambda: session.processes.run(["/bin/bash", "-l", "-c", "true"]).check()),
            )
            yield Figure('E2B: run_code("1+1")', "ms", code_ms, Reference("execute", execute_ms), AtMost(6))
            reference = Reference("processes.run, same shell", process_ms)
            yield Figure('E2B: commands.run("true")', "ms", command_ms, reference, AtMost(15))

            data = bytes(_FILE_BYTES)
            there_ms, put_ms, back_ms, get_ms = bench.in_turns(
                _FILES,
                lambda: timed(lambda: sandbox.files.write("large", data)),
                lambda: timed(lambda: session.files.write("large", data)),
                lambda: timed(lambda: sandbox.files.read("large", format="bytes")),
                lambda: timed(lambda: session.files.read("large")),
                warm_up=1,
            )
            yield Figure("E2B: write 50 MB", "ms", there_ms, Reference("files.write", put_ms), AtMost(1000))
            yield Figure("E2B: read 50 MB", "ms", back_ms, Reference("files.read", get_ms), AtMost(1000))
    finally:
        sandbox.kill()


def connect(bench: Bench) -> Iterator[Figure]:
    """`1+1` by Connect compared with the same by gRPC, and `/v1/run` compared with a session with one execution."""
    daemon, url = bench.local.daemon, bench.gateway
    headers = {"authorization": f"Bearer {daemon.token}"}
    ids = itertools.count()
    with (
        bench.local.cold_session() as session,
        grpc.insecure_channel(daemon.unix_address) as channel,
    ):
        stub = executor_service_pb2_grpc.ExecutorServiceStub(channel)

        def request() -> pb.ExecuteRequest:
            return pb.ExecuteRequest(session_id=session.session_id, execution_id=f"x{next(ids)}", code="1+1")

        def by_grpc() -> float:
            return timed(lambda: list(stub.Execute(request(), metadata=tuple(headers.items()))))

        def by_connect(codec: Codec[Any, Any]) -> Any:
            client = ConnectClientSync(url, codec=codec, send_compression=None, accept_compression=())
            return lambda: timed(
                lambda: list(client.execute_server_stream(request=request(), method=_EXECUTE, headers=headers))
            )

        def alone() -> None:
            with bench.local.client.create_session() as own:
                own.execute("1+1")

        def run() -> None:
            asked = urllib.request.Request(f"{url}/v1/run", json.dumps({"code": "1+1"}).encode(), headers)
            with urllib.request.urlopen(asked) as answer:
                assert json.load(answer)["output"] == 2

        grpc_ms, binary_ms, json_ms = bench.in_turns(
            _CONNECT_ROUNDS,
            by_grpc,
            by_connect(google_protobuf_binary_codec()),
            by_connect(google_protobuf_json_codec()),
        )
        alone_ms, run_ms = bench.in_turns(_RUN_ROUNDS, lambda: timed(alone), lambda: timed(run))
    by = Reference("gRPC, the same stub", grpc_ms)
    yield Figure("Connect Execute 1+1, binary", "ms", binary_ms, by, AtMostTimes(2))
    yield Figure("Connect Execute 1+1, JSON", "ms", json_ms, by, AtMostTimes(2))
    yield Figure("POST /v1/run 1+1", "ms", run_ms, Reference("create, execute, end by gRPC", alone_ms))
