"""The gateway as a process: what answers where, and how it stops."""

from __future__ import annotations

import httpx

from tests.support.gateway import Gateway


def test_traffic_of_an_unknown_sandbox_is_answered_as_the_sdks_expect(gateway: Gateway) -> None:
    headers = {"E2b-Sandbox-Id": "abc", "E2b-Sandbox-Port": "49983"}
    answer = httpx.get(f"{gateway.url}/health", headers=headers)
    assert (answer.status_code, answer.json()) == (502, {"code": 502, "message": "The sandbox was not found"})
