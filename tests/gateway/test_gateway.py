"""The gateway as a process: what answers where, and what it refuses to start with."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
import websockets

from executor_client import ExecutorClient
from tests.support.certificates import Authority
from tests.support.daemon import is_known
from tests.support.fork_server import SERVER, popen
from tests.support.gateway import Gateway
from tests.support.polling import eventually

TIMEOUT_S = 60.0


def run(*arguments: str) -> tuple[int, str, str]:
    """Runs a command of the server that must end by itself. Returns its exit code, its output and its errors."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen([*SERVER, *arguments], text=True, **pipes) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output, errors


def test_traffic_of_an_unknown_sandbox_is_answered_as_the_sdks_expect(gateway: Gateway) -> None:
    headers = {"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": "49983"}
    answer = httpx.get(f"{gateway.url}/health", headers=headers)
    assert (answer.status_code, answer.json()) == (502, {"code": 502, "message": "The sandbox was not found"})


@pytest.mark.parametrize(
    ("headers", "status"), [({}, 403), ({"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": "8000"}, 502)]
)
def test_a_websocket_to_nowhere_is_refused(gateway: Gateway, headers: dict[str, str], status: int) -> None:
    async def connect() -> int:
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(f"{gateway.url.replace('http', 'ws')}/v1/run", additional_headers=headers)
        return refused.value.response.status_code

    assert asyncio.run(connect()) == status


def test_a_token_in_the_form_of_e2bs_keys_is_a_token_until_it_is_revoked(gateway: Gateway) -> None:
    place = ["--state-dir", str(gateway.daemon.state_dir)]
    code, output, errors = run("token", "new", "--tenant", "one", "--form", "e2b", *place)
    token = output.strip()
    assert code == 0, errors
    assert re.fullmatch("e2b_[0-9a-f]{40}", token)
    with ExecutorClient(gateway.daemon.address, token=token) as client:
        assert is_known(client)
    found = re.search(r"Token (\w+) of", errors)
    assert found is not None
    assert run("token", "revoke", found[1], *place)[0] == 0
    with ExecutorClient(gateway.daemon.address, token=token) as client:
        assert eventually(lambda: not is_known(client))
    with ExecutorClient(gateway.daemon.address, token=token[:-1] + "g") as client:
        assert not is_known(client)


def test_it_does_not_start_where_tokens_would_be_exposed_or_files_are_wrong(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "ca").server()
    other = Authority(tmp_path / "other").server()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        cases: dict[str, tuple[int, list[str]]] = {
            "unencrypted": (4, ["--listen", "0.0.0.0:3000"]),
            "is in use": (4, ["--listen", f"127.0.0.1:{taken.getsockname()[1]}"]),
            "HOST:PORT": (3, ["--listen", "nonsense"]),
            "must be given together": (3, ["--tls-cert", str(pair.cert)]),
            "a DNS name": (3, ["--domain", "*.x"]),
            "can't be used": (3, ["--tls-cert", str(pair.cert), "--tls-key", str(other.key)]),
        }
        for reason, (code, options) in cases.items():
            ended, _, errors = run("gateway", "--state-dir", str(tmp_path / "state"), *options)
            assert (ended, reason in errors) == (code, True), (reason, errors)


def test_two_gateways_do_not_share_a_state_directory(gateway: Gateway) -> None:
    code, _, errors = run("gateway", "--listen", "127.0.0.1:1", "--state-dir", str(gateway.daemon.state_dir))
    assert code == 4
    assert "Another gateway is running" in errors
