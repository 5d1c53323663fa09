"""The manifests for Kubernetes: what they name is there, and what they configure is a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from executor_server.core.config import parse_toml, validated
from executor_server.core.config.config import Config
from executor_server.fleet.membership import is_node_name
from executor_server.fleet.ray.configs import check_config
from executor_server.fleet.ray.layout import RESOURCE

FOLDER = Path(__file__).parents[2] / "examples/kubernetes"
MANIFESTS = sorted(FOLDER.glob("*.yaml"))

manifests = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


def documents(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for document in yaml.safe_load_all(path.read_text()):
        found.setdefault(document["kind"], []).append(document)
    return found


def templates(path: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yields each pod's spec, with the volumes that its set claims for it."""
    kinds = documents(path)
    for each in kinds.get("StatefulSet", ()):
        claims = [claim["metadata"]["name"] for claim in each["spec"].get("volumeClaimTemplates", ())]
        yield each["spec"]["template"]["spec"], claims
    for each in kinds.get("RayCluster", ()):
        groups = [each["spec"]["headGroupSpec"], *each["spec"]["workerGroupSpecs"]]
        yield from ((group["template"]["spec"], []) for group in groups)


@manifests
def test_all_objects_are_in_one_namespace_and_have_names_of_their_own(path: Path) -> None:
    objects = [(kind, each["metadata"]) for kind, found in documents(path).items() for each in found]
    assert {metadata["namespace"] for _, metadata in objects} == {"remote-executor"}
    names = [(kind, metadata["name"]) for kind, metadata in objects]
    assert len(set(names)) == len(names)


@manifests
def test_each_mount_is_of_a_volume_and_each_volume_is_mounted(path: Path) -> None:
    for spec, claims in templates(path):
        containers = [*spec["containers"], *spec.get("initContainers", ())]
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]} | set(claims)


@manifests
def test_each_config_map_and_claim_that_a_pod_mounts_is_in_the_file(path: Path) -> None:
    kinds = documents(path)
    there = {kind: {each["metadata"]["name"] for each in found} for kind, found in kinds.items()}
    for spec, _ in templates(path):
        for volume in spec["volumes"]:
            assert volume.get("configMap", {"name": None})["name"] in {None, *there["ConfigMap"]}
            claim = volume.get("persistentVolumeClaim", {"claimName": None})["claimName"]
            assert claim in {None, *there.get("PersistentVolumeClaim", ())}


@manifests
def test_no_container_has_a_capability_and_no_pod_a_token_of_the_cluster_unless_ray_needs_it(path: Path) -> None:
    for spec, _ in templates(path):
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            if container["name"] == "ray-head":
                continue
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["allowPrivilegeEscalation"] is False
            assert "procMount" not in context or spec["hostUsers"] is False
    if path.name == "statefulset.yaml":
        assert all(spec["automountServiceAccountToken"] is False for spec, _ in templates(path))


def test_the_front_and_the_nodes_of_the_stateful_sets_find_each_other() -> None:
    kinds = documents(FOLDER / "statefulset.yaml")
    configs = kinds["ConfigMap"][0]["data"]
    front, node = (validated(Config, parse_toml(configs[name].encode(), name)) for name in ("front.toml", "node.toml"))
    assert (front.fleet.role, node.fleet.role) == ("front", "node")
    services = {each["metadata"]["name"]: each["spec"] for each in kinds["Service"]}
    sets = {each["metadata"]["name"]: each["spec"] for each in kinds["StatefulSet"]}
    host, _, port = (front.fleet.dns or "").rpartition(":")
    service = services[host.removesuffix(".remote-executor.svc.cluster.local")]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == sets["executor-node"]["template"]["metadata"]["labels"]
    assert (node.fleet.listen or "").endswith(f":{port}")
    (container,) = sets["executor-node"]["template"]["spec"]["containers"]
    assert container["ports"] == [{"name": "link", "containerPort": int(port)}]
    assert services["executor"]["selector"] == sets["executor-front"]["template"]["metadata"]["labels"]
    assert sets["executor-front"]["replicas"] == 1
    assert all(is_node_name(f"executor-node-{number}") for number in range(sets["executor-node"]["replicas"]))


def test_the_workers_of_ray_offer_the_resource_and_the_head_does_not() -> None:
    kinds = documents(FOLDER / "raycluster.yaml")
    check_config(kinds["ConfigMap"][0]["data"]["fleet.toml"])
    spec = kinds["RayCluster"][0]["spec"]
    assert "resources" not in spec["headGroupSpec"]["rayStartParams"]
    for group in spec["workerGroupSpecs"]:
        assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {RESOURCE: 1}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
