"""The environment variables of sandboxes."""

from __future__ import annotations

from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import pytest

from executor_server.backends.settings import CA_BUNDLE, egress_environment


def test_programs_that_read_either_spelling_find_the_proxy() -> None:
    variables = egress_environment()
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        assert variables[name] == variables[name.upper()]
    assert variables["https_proxy"] == "http://127.0.0.1:3128"


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.1:8000", "::1"])
def test_the_sandbox_s_own_servers_are_reached_without_the_proxy(host: str) -> None:
    own = egress_environment()["no_proxy"]
    assert proxy_bypass_environment(host, {"no": own})
    assert not proxy_bypass_environment("pypi.org", {"no": own})


def test_authorities_are_named_only_where_there_is_a_file_of_them() -> None:
    assert CA_BUNDLE in egress_environment().values()
    assert not [
        name for name in egress_environment(ca_bundle=None) if "CERT" in name or "CA_" in name or "CAINFO" in name
    ]
