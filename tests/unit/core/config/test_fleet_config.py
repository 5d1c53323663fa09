"""Claims about the section [fleet]."""

from __future__ import annotations

from typing import Any

import pytest

from executor_server.core.config import ConfigError, load

FRONT = {"role": "front", "certificates": "/c", "nodes": ["a:1"]}
NODE = {"role": "node", "certificates": "/c", "listen": "0.0.0.0:1"}


def problems(**fleet: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(None, {"fleet": fleet})
    return "\n".join(caught.value.problems)


@pytest.mark.parametrize("source", [{"nodes": ["a:1"]}, {"dns": "nodes:1"}, {"nodes_file": "/n"}])
def test_a_front_has_one_source_of_nodes(source: dict[str, Any]) -> None:
    assert load(None, {"fleet": {"role": "front", "certificates": "/c", **source}}).fleet.role == "front"
    assert "fleet.nodes" in problems(role="front", certificates="/c")


def test_a_member_needs_its_certificate() -> None:
    assert "fleet.certificates" in problems(role="front", nodes=["a:1"])
    assert "fleet.certificates" in problems(role="node", listen="a:1")
    assert "fleet.listen" in problems(role="node", certificates="/c")


def test_keys_of_the_other_role_are_refused() -> None:
    assert "fleet.listen" in problems(**FRONT, listen="a:1")
    assert "fleet.nodes" in problems(**NODE, nodes=["a:1"])
    assert "fleet.labels" in problems(labels={"a": "b"})


@pytest.mark.parametrize("address", ["a", "unix:/a", "a:b", "a:1,b:2"])
def test_addresses_of_nodes_have_a_port(address: str) -> None:
    assert "fleet.nodes.0" in problems(**{**FRONT, "nodes": [address]})


def test_times_that_can_not_keep_a_lease_are_refused() -> None:
    assert "report_interval_s" in problems(**FRONT, lease_s=1.0, report_interval_s=0.5)
    assert "fence_s" in problems(**FRONT, lease_s=3.0, fence_s=2.0)
