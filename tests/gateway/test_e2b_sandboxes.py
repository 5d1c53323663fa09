"""E2B's account: sandboxes are created, found, listed, prolonged and ended, and only by their tenant."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2b import AsyncSandbox, Sandbox, SandboxException, SandboxQuery, SandboxState

from executor_client import ExecutorClient
from tests.support.backends import require
from tests.support.daemon import Daemon, daemon_of
from tests.support.gateway import Gateway, e2b_token, running_gateway
from tests.support.polling import eventually

AT_ONCE = 100


@pytest.fixture
def sandbox(e2b: Gateway) -> Iterator[Sandbox]:
    with ended(Sandbox.create(timeout=60)) as sandbox:
        yield sandbox


@contextlib.contextmanager
def ended(sandbox: Sandbox) -> Iterator[Sandbox]:
    try:
        yield sandbox
    finally:
        sandbox.kill()


def request(gateway: Gateway, method: str, path: str, token: str | None = None, **more: Any) -> httpx.Response:
    headers = {"X-API-Key": token or gateway.token, **more.pop("headers", {})}
    return httpx.request(method, f"{gateway.url}{path}", headers=headers, timeout=30, **more)


def created(gateway: Gateway, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return request(gateway, "POST", "/v2/sandboxes", json={"templateID": "base", **fields}, headers=headers)


def refusal(answer: httpx.Response) -> tuple[int, str]:
    body = answer.json()
    assert body["code"] == answer.status_code
    return answer.status_code, body["message"]


def sessions(gateway: Gateway) -> set[str]:
    """The sandboxes that the daemon has for the tenant."""
    with ExecutorClient(gateway.daemon.address, token=gateway.token) as client:
        return {info.labels["sandbox"] for info in client.list_sessions()}


def test_a_sandbox_lives_from_its_creation_to_its_end(e2b: Gateway) -> None:
    metadata = {"owner & co": "50 %", "ü": "=?"}
    sandbox = Sandbox.create(timeout=60, metadata=metadata, envs={"A": "1"})
    try:
        info = sandbox.get_info()
        assert (info.sandbox_id, info.metadata, info.state) == (sandbox.sandbox_id, metadata, SandboxState.RUNNING)
        assert info.template_id in ("base", "code-interpreter-v1")
        assert (info.end_at - info.started_at).total_seconds() == 60
        assert sandbox.is_running()
        for filter_, found in ((metadata, [sandbox.sandbox_id]), ({"owner & co": "50"}, [])):
            page = Sandbox.list(query=SandboxQuery(metadata=filter_)).next_items()
            assert [each.sandbox_id for each in page] == found
        assert sessions(e2b) >= {sandbox.sandbox_id}
    finally:
        assert sandbox.kill()
    assert not sandbox.kill()
    assert not sandbox.is_running()
    assert sandbox.sandbox_id not in sessions(e2b)
    with pytest.raises(SandboxException, match="not found"):
        sandbox.get_info()


def test_a_session_that_was_ended_elsewhere_is_no_sandbox(e2b: Gateway) -> None:
    sandbox, other = Sandbox.create(), Sandbox.create()
    assert sandbox.is_running()
    with ExecutorClient(e2b.daemon.address, token=e2b.token) as client:
        for info in client.list_sessions():
            if info.labels["sandbox"] in (sandbox.sandbox_id, other.sandbox_id):
                client.get_session(info.session_id).close()
    assert not sandbox.is_running()
    assert not other.kill()
    assert Sandbox.list().next_items() == []


def test_lists_have_pages_in_either_order(e2b: Gateway) -> None:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(ended(Sandbox.create(metadata={"of": "pages"}))).sandbox_id for _ in range(3)]
        paginator = Sandbox.list(query=SandboxQuery(metadata={"of": "pages"}), limit=2)
        pages = []
        while paginator.has_next:
            pages.append([each.sandbox_id for each in paginator.next_items()])
        assert pages == [made[:0:-1], made[:1]]
        found, token = [], ""
        for _ in made:
            query = {"metadata": "of=pages", "order": "asc", "limit": "1", **({"nextToken": token} if token else {})}
            answer = request(e2b, "GET", "/v2/sandboxes", params=query)
            found += [each["sandboxID"] for each in answer.json()]
            token = answer.headers.get("x-next-token", "")
        assert (found, token) == (made, "")
        everything = request(e2b, "GET", "/sandboxes", params={"metadata": "of=pages"}).json()
        assert [each["sandboxID"] for each in everything] == made
        assert request(e2b, "GET", "/v2/sandboxes", params={"state": "paused"}).json() == []
    too_early = "0001-01-01T00:00:00+14:00"
    for wrong in (
        {"limit": "0"},
        {"limit": "1e9"},
        {"nextToken": "[[["},
        {"startedAfter": "soon"},
        {"startedAfter": too_early},
    ):
        assert refusal(request(e2b, "GET", "/v2/sandboxes", params=wrong))[0] == 400, wrong


def test_the_tenants_newer_key_takes_over_a_sandbox(e2b: Gateway, sandbox: Sandbox) -> None:
    newer = e2b_token(e2b.daemon, "one")
    assert Sandbox.connect(sandbox.sandbox_id, api_key=newer).is_running()


def test_ids_that_are_paths_are_not_found(e2b: Gateway) -> None:
    for sandbox_id in ("%2e%2e%2fetc", "a%2fb", "i0%00", "'", "x" * 4000, "%ff"):
        assert request(e2b, "GET", f"/sandboxes/{sandbox_id}").status_code in (400, 404), sandbox_id
        assert request(e2b, "DELETE", f"/sandboxes/{sandbox_id}").status_code in (400, 404, 405), sandbox_id


def test_timeouts_end_a_sandbox(e2b: Gateway, sandbox: Sandbox) -> None:
    def left_s() -> float:
        return sandbox.get_info().end_at.timestamp() - time.time()

    assert 55 < left_s() <= 60
    Sandbox.connect(sandbox.sandbox_id, timeout=1)
    assert left_s() > 55  # connecting never shortens it
    Sandbox.connect(sandbox.sandbox_id, timeout=600)
    assert 590 < left_s() <= 600
    # As the SDK 2.20 does: with the headers of traffic to the sandbox.
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    path = f"/sandboxes/{sandbox.sandbox_id}/connect"
    assert request(e2b, "POST", path, json={"timeout": 700}, headers=headers).status_code == 200
    assert 690 < left_s() <= 700
    one = f"/sandboxes/{sandbox.sandbox_id}"
    assert request(e2b, "POST", f"{one}/refreshes", json={"duration": 900}).status_code == 204
    assert 890 < left_s() <= 900
    for wrong in (-1, 1.5, True, "60", None, 10**9, 10**400):
        assert (
            refusal(request(e2b, "POST", f"{one}/timeout", content=str({"timeout": wrong}).replace("'", '"')))[0] == 400
        )
    status, message = refusal(request(e2b, "POST", f"{one}/timeout", json={"timeout": 10**9}))
    assert status == 400
    assert "session_time_s" in message
    assert left_s() > 800
    sandbox.set_timeout(0)
    assert not sandbox.is_running()
    assert not sandbox.kill()
    assert eventually(lambda: sandbox.sandbox_id not in sessions(e2b))
    answer = created(e2b, timeout=0)
    assert answer.status_code == 201
    assert eventually(lambda: answer.json()["sandboxID"] not in sessions(e2b))


def test_what_is_not_offered_is_refused_with_its_reason(e2b: Gateway, sandbox: Sandbox) -> None:
    one = f"/sandboxes/{sandbox.sandbox_id}"
    paths = ("/pause", "/resume", "/fork", "/snapshots")
    answers = [request(e2b, "POST", one + path, json={}) for path in paths]
    answers += [request(e2b, "PUT", f"{one}/network", json={}), request(e2b, "GET", "/v2/templates")]
    answers += [request(e2b, "DELETE", "/templates/x"), request(e2b, "POST", "/volumes", json={"name": "x"})]
    fields: tuple[dict[str, Any], ...] = (
        {"autoPause": True},
        {"autoResume": {"enabled": True}},
        {"mcp": {"x": {}}},
        {"volumeMounts": [{"name": "x", "path": "/x"}]},
        {"iam": {"tokens": {"x": {}}}},
        {"network": {"denyOut": ["10.0.0.0/8"]}},
        {"network": {"egressProxy": {"address": "a:1"}}},
        {"aFieldOfTomorrow": 1},
    )
    answers += [created(e2b, **each) for each in fields]
    for answer in answers:
        status, message = refusal(answer)
        assert status == 501, answer.request.content
        assert "is not offered by remote-executor" in message
    with pytest.raises(SandboxException, match="not offered"):
        sandbox.pause()
    assert refusal(created(e2b, network={"allowOut": ["example.com"]}))[0] == 403
    status, message = refusal(created(e2b, templateID="no-such"))
    assert (status, "base" in message) == (404, True)


def test_wrong_keys_and_bodies_are_refused(e2b: Gateway) -> None:
    assert refusal(httpx.get(f"{e2b.url}/v2/sandboxes"))[0] == 401
    bodies = (
        b"",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"templateID": 1}',
        b'{"templateID": ""}',
        b'{"templateID": "base", "a',
    )
    for body in bodies:
        assert refusal(request(e2b, "POST", "/v2/sandboxes", content=body))[0] == 400, body[:20]
    assert refusal(request(e2b, "POST", "/v2/sandboxes", content=b" " * (2 << 20)))[0] == 413
    many = {str(number): "" for number in range(1000)}
    assert refusal(created(e2b, metadata=many))[0] == 400
    assert refusal(created(e2b, metadata={"a": 1}))[0] == 400
    assert refusal(created(e2b, envVars={"A": "x" * 100_000}))[0] == 400
    assert refusal(created(e2b, envVars={"A=B": "x"}))[0] == 400


def test_an_idempotency_key_makes_one_sandbox(e2b: Gateway) -> None:
    headers = {"Idempotency-Key": "once-1"}
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(lambda _: created(e2b, timeout=60, headers=headers), range(4)))
    (sandbox_id,) = {answer.json()["sandboxID"] for answer in answers}
    assert refusal(created(e2b, timeout=61, headers=headers))[0] == 409
    assert refusal(created(e2b, headers={"Idempotency-Key": "Not/One"}))[0] == 400
    assert Sandbox.kill(sandbox_id)
    again = created(e2b, timeout=60, headers=headers)
    assert again.json()["envdAccessToken"] != answers[0].json()["envdAccessToken"]
    assert Sandbox.kill(again.json()["sandboxID"])


def test_usage_is_measured(e2b: Gateway, sandbox: Sandbox) -> None:
    (measured,) = sandbox.get_metrics()
    assert measured.cpu_count >= 1
    assert 0 < measured.mem_used < measured.mem_total
    assert 0 <= measured.disk_used < measured.disk_total


@pytest.mark.asyncio
async def test_a_hundred_sandboxes_are_created_at_once(e2b: Gateway) -> None:
    made = await asyncio.gather(*(AsyncSandbox.create(metadata={"of": "many"}) for _ in range(AT_ONCE)))
    paginator = AsyncSandbox.list(query=SandboxQuery(metadata={"of": "many"}))
    found = [each.sandbox_id for each in await paginator.next_items()]
    assert sorted(found) == sorted(each.sandbox_id for each in made)
    assert len(set(found)) == AT_ONCE
    assert all(await asyncio.gather(*(each.kill() for each in made)))


def test_sandboxes_outlive_the_gateway_and_end_at_their_time(daemon: Daemon, tmp_path: Path) -> None:
    own = ("--state-dir", str(tmp_path), "--daemon", daemon.address)
    with running_gateway(daemon, *own) as first:
        kept, due = (created(first, timeout=timeout).json() for timeout in (60, 1))
        first.process.kill()
        first.process.wait()
    with running_gateway(daemon, *own) as second:
        one = f"/sandboxes/{kept['sandboxID']}"
        info = request(second, "GET", one).json()
        assert info["envdAccessToken"] == kept["envdAccessToken"]
        assert eventually(lambda: due["sandboxID"] not in sessions(second))
        assert request(second, "DELETE", one).status_code == 204


def test_an_unused_sandbox_lives_until_its_end_if_a_gateway_is_there() -> None:
    require("local")
    policy = """
default = "brief"
[profiles.brief.limits.default]
idle_time_s = 1.0
"""
    with daemon_of("", "--backend", "local", policy=policy) as daemon, running_gateway(daemon) as gateway:
        begin = time.monotonic()
        sandbox, left = (created(gateway, timeout=timeout).json()["sandboxID"] for timeout in (4, 600))
        assert eventually(lambda: sandbox not in sessions(gateway))
        assert time.monotonic() - begin >= 4
        assert left in sessions(gateway)
        gateway.process.kill()
        gateway.process.wait()
        assert eventually(lambda: left not in sessions(gateway))


def test_a_sandbox_is_created_without_imports_that_need_an_approval() -> None:
    """The gateway requested "*", which was refused if nobody could approve it."""
    require("local")
    policy = 'default = "p"\n[profiles.p.imports]\nallowed = ["csv", "*"]\nask = ["subprocess"]\n'
    with daemon_of("", policy=policy) as daemon, running_gateway(daemon) as gateway:
        assert created(gateway).status_code == 201
        with ExecutorClient(daemon.address, token=gateway.token) as client:
            (session,) = client.list_sessions()
    assert "csv" in session.authorized_imports
    assert "*" not in session.authorized_imports
