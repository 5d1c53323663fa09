"""The dashboards and alerts of ops/ name metrics and labels that exist."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from executor_server.telemetry.metrics import Metrics
from executor_server.telemetry.sources import DESCRIBED

ROOT = Path(__file__).parents[2]
OPS = ROOT / "ops"


def _expressions() -> list[str]:
    dashboards = [json.loads(path.read_text()) for path in sorted((OPS / "grafana").iterdir())]
    lines = [target["expr"] for dashboard in dashboards for panel in dashboard["panels"] for target in panel["targets"]]
    groups = yaml.safe_load((OPS / "prometheus/alerts.yaml").read_text())["groups"]
    return lines + [rule["expr"] for group in groups for rule in group["rules"]]


def test_the_files_are_what_the_generator_writes() -> None:
    subprocess.run([sys.executable, "tools/ops.py", "--check"], cwd=ROOT, check=True)


@pytest.mark.parametrize("expression", sorted(set(_expressions())))
def test_each_metric_and_label_in_an_expression_exists(expression: str) -> None:
    metrics = Metrics(version="", backend="", methods=())
    labels: dict[str, set[str]] = {}
    for entry in (*metrics.described, *DESCRIBED):
        names = (f"{entry.name}_bucket",) if entry.kind == "histogram" else (entry.name,)
        labels |= {name: {*entry.labels, "le"} for name in names}
    named = re.findall(r"remote_executor_\w+", expression)
    assert named or "process_cpu_seconds_total" in expression
    assert set(named) <= set(labels)
    grouped = [word.strip() for group in re.findall(r"(?:by|on) \(([^)]*)\)", expression) for word in group.split(",")]
    selected = re.findall(r"(\w+)[=!]~?\"", expression)
    assert all({*grouped, *selected} <= labels[name] for name in named)
