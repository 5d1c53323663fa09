"""What no SDK sends to the process service of envd: tags, binary messages, input that is wrong, readers that don't read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil
import pytest
from connectrpc.code import Code
from connectrpc.errors import ConnectError

from executor_server.gateway.e2b.envd import process_pb2 as pb
from executor_server.gateway.e2b.envd.process_connect import ProcessClient
from tests.support.gateway import Gateway
from tests.support.polling import eventually


@dataclass(frozen=True)
class Envd:
    """envd of a sandbox, without an SDK."""

    client: ProcessClient
    headers: dict[str, str]
    url: str


@pytest.fixture(scope="module")
def traffic(gateway: Gateway) -> Iterator[dict[str, str]]:
    """The headers of traffic of a sandbox."""
    with httpx.Client(base_url=gateway.url, headers={"X-API-Key": gateway.token}, timeout=60) as http:
        created = http.post("/v2/sandboxes", json={"templateID": "base"}).raise_for_status().json()
        yield {
            "E2b-Sandbox-Id": created["sandboxID"],
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": created["envdAccessToken"],
        }
        http.delete(f"/sandboxes/{created['sandboxID']}").raise_for_status()


@pytest.fixture
async def envd(gateway: Gateway, traffic: dict[str, str]) -> Envd:
    return Envd(ProcessClient(gateway.url, send_compression=None), traffic, gateway.url)


async def test_a_tag_names_a_process(envd: Envd) -> None:
    request = pb.StartRequest(process=pb.ProcessConfig(cmd="sleep", args=["3600"]), tag="ä tag/1")
    selector = pb.ProcessSelector(tag="ä tag/1")
    events = envd.client.start(request, headers=envd.headers)
    pid = (await anext(events)).event.start.pid
    listed = await envd.client.list(pb.ListRequest(), headers=envd.headers)
    assert [(each.pid, each.tag) for each in listed.processes if each.HasField("tag")] == [(pid, "ä tag/1")]
    kill = pb.SendSignalRequest(process=selector, signal=pb.SIGNAL_SIGTERM)
    await envd.client.send_signal(kill, headers=envd.headers)
    assert [each.event.end.status async for each in events] == ["signal: terminated"]
    with pytest.raises(ConnectError) as refused:
        await envd.client.send_signal(kill, headers=envd.headers)
    assert refused.value.code is Code.NOT_FOUND


async def test_silence_is_filled_with_keepalives(envd: Envd) -> None:
    request = pb.StartRequest(process=pb.ProcessConfig(cmd="cat"), stdin=True)
    events = envd.client.start(request, headers={**envd.headers, "Keepalive-Ping-Interval": "1"})
    selector = pb.ProcessSelector(pid=(await anext(events)).event.start.pid)
    assert (await anext(events)).event.HasField("keepalive")
    await envd.client.close_stdin(pb.CloseStdinRequest(process=selector), headers=envd.headers)
    async for event in events:
        last = event.event
    assert last.end.exited


@pytest.mark.parametrize(
    ("request_", "headers", "code"),
    [
        (pb.StartRequest(process=pb.ProcessConfig(cmd="/no/such")), {}, Code.INVALID_ARGUMENT),
        (pb.StartRequest(process=pb.ProcessConfig(cmd="true"), tag="x" * 100), {}, Code.INVALID_ARGUMENT),
        (pb.StartRequest(process=pb.ProcessConfig(cmd="true")), {"Authorization": "Basic ?"}, Code.UNAUTHENTICATED),
        (pb.StartRequest(process=pb.ProcessConfig(cmd="true", args=["x" * 200_000])), {}, Code.INVALID_ARGUMENT),
        (pb.StartRequest(process=pb.ProcessConfig(cmd="true", args=[""] * 20_001)), {}, Code.INVALID_ARGUMENT),
        (pb.StartRequest(), {}, Code.INVALID_ARGUMENT),
    ],
)
async def test_bad_starts_are_refused(
    envd: Envd, request_: pb.StartRequest, headers: dict[str, str], code: Code
) -> None:
    with pytest.raises(ConnectError) as refused:
        await anext(envd.client.start(request_, headers={**envd.headers, **headers}))
    assert refused.value.code is code, refused.value


@pytest.mark.parametrize("timeout_ms", ["0", "9999999999"])
async def test_a_timeout_of_zero_is_none_and_one_may_be_long(envd: Envd, timeout_ms: str) -> None:
    request = pb.StartRequest(process=pb.ProcessConfig(cmd="sh", args=["-c", "sleep 0.1; exit 3"]))
    headers = {**envd.headers, "Connect-Timeout-Ms": timeout_ms}
    *_, last = [event.event async for event in envd.client.start(request, headers=headers)]
    assert last.end.exit_code == 3


@pytest.mark.parametrize("body", [b"null", b'{"pid": "x"}', b'{"process": {"pid": -1}}'])
def test_malformed_messages_are_the_clients_error(envd: Envd, body: bytes) -> None:
    answer = httpx.post(
        f"{envd.url}/process.Process/SendInput",
        content=body,
        headers={**envd.headers, "Content-Type": "application/json"},
    )
    assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument")


async def test_output_that_nobody_reads_stays_in_the_sandbox(gateway: Gateway, envd: Envd) -> None:
    """A client that opens a stream and does not read: neither the gateway nor the daemon holds what it misses."""
    processes = [psutil.Process(pid) for pid in (gateway.process.pid, gateway.daemon.process.pid)]
    request = pb.StartRequest(process=pb.ProcessConfig(cmd="yes"))
    events = envd.client.start(request, headers=envd.headers)
    pid = (await anext(events)).event.start.pid
    before = [each.memory_info().rss for each in processes]
    assert not eventually(
        lambda: any(each.memory_info().rss > was + (48 << 20) for each, was in zip(processes, before, strict=True)),
        timeout_s=2,
    )
    kill = pb.SendSignalRequest(process=pb.ProcessSelector(pid=pid), signal=pb.SIGNAL_SIGKILL)
    await envd.client.send_signal(kill, headers=envd.headers)
