"""Names of nodes, and the configurations that are made of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_server.core.config import ConfigError, load
from executor_server.fleet.membership import is_node_name
from executor_server.fleet.ray.configs import FENCE_S, check_config, write_front_config, write_node_config
from executor_server.fleet.ray.layout import NAME_LABEL, FleetFiles, node_name_of


@given(st.text(max_size=200))
def test_every_host_gets_a_name_that_a_node_may_have(host: str) -> None:
    assert is_node_name(node_name_of({}, host))


def test_long_names_of_hosts_that_differ_at_their_end_stay_different() -> None:
    first, second = (node_name_of({}, f"raycluster-kuberay-workergroup-worker-{end}") for end in ("abcde", "abcdf"))
    assert first != second


def test_the_label_of_a_ray_node_names_its_daemon() -> None:
    assert node_name_of({NAME_LABEL: "gpu-1"}, "host") == "gpu-1"


def test_a_front_gets_no_key_of_a_node_and_a_node_none_of_a_front(tmp_path: Path) -> None:
    text = '[fleet]\npark_s = 7.0\nlease_s = 4.0\nlabels = { zone = "a" }\n[pool]\nsize = 1\n'
    files = FleetFiles(tmp_path)
    front = write_front_config(files.front, text)
    node = write_node_config(files.node("n1"), text, "127.0.0.1", {"disk": "fast"})
    assert (front.fleet.role, front.fleet.park_s, front.fleet.labels, front.pool.size) == ("front", 7.0, {}, 1)
    assert (node.fleet.role, node.fleet.park_s) == ("node", 5.0)
    assert node.fleet.labels == {"zone": "a", "disk": "fast"}
    assert front.fleet.lease_s == node.fleet.lease_s == 4.0
    assert load(files.node("n1").daemon.config_file) == node


def test_nodes_outlive_a_front_for_as_long_as_ray_may_take_to_start_the_next_one(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path)
    for text, fence_s in (("", FENCE_S), ("[fleet]\nfence_s = 5.0\n", 5.0)):
        front = write_front_config(files.front, text)
        node = write_node_config(files.node("n1"), text, "127.0.0.1", {})
        assert front.fleet.fence_s == node.fleet.fence_s == fence_s


def test_a_node_reads_no_policy_and_no_tokens_of_its_own(tmp_path: Path) -> None:
    text = '[policy]\nfile = "/p.toml"\n[server]\ntoken_file = "/t.json"\n[state]\nkey_file = "/k"\n'
    files = FleetFiles(tmp_path)
    node = write_node_config(files.node("n1"), text, "127.0.0.1", {})
    assert (node.policy.file, node.server.token_file, node.state.key_file) == (None, None, None)
    assert write_front_config(files.front, text).policy.file == Path("/p.toml")


def test_the_address_of_a_node_stays_when_it_is_configured_again(tmp_path: Path) -> None:
    files = FleetFiles(tmp_path).node("n1")
    before = write_node_config(files, "", "127.0.0.1", {}).fleet
    after = write_node_config(files, "[pool]\nsize = 0\n", "127.0.0.1", {}).fleet
    assert after.listen == before.listen
    assert write_node_config(files, "", "127.0.0.9", {}).fleet.listen != before.listen


def test_a_node_has_no_address_for_clients(tmp_path: Path) -> None:
    text = '[server]\ntls_cert = "/c.pem"\ntls_key = "/k.pem"\n'
    node = write_node_config(FleetFiles(tmp_path).node("n1"), text, "127.0.0.1", {})
    assert node.server.listen == ()
    assert node.server.tls_cert is None


def test_keys_of_both_roles_are_one_good_configuration() -> None:
    check_config('[fleet]\npark_s = 1.0\nlabels = { zone = "a" }\n')


def test_a_configuration_that_is_none_is_refused(tmp_path: Path) -> None:
    texts = (
        "[fleet]\nfront = 1\n",
        "server = 5\n",
        "fleet = 5\n",
        "[",
        "[fleet]\nlease_s = -1\n",
        "[fleet]\nlabels = 5\n",
    )
    for text in texts:
        with pytest.raises(ConfigError):
            check_config(text)
    with pytest.raises(ConfigError):
        write_front_config(FleetFiles(tmp_path).front, texts[0])
    assert list(tmp_path.iterdir()) == []
