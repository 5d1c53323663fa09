"""A daemon that is watched: its metrics are read, its traces collected, its policy is a file."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemon import Daemon, running_daemon
from tests.support.otlp import Collector, collecting
from tests.support.polling import eventually

PREFIX = "remote_executor_"
POLICY = """
version = "{version}"
default = "plain"

[profiles.plain.tools]
ask = ["delete"]

[profiles.plain.limits.default]
session_operations = 10_000_000

[profiles.plain.quotas]
sessions = 3

[tenants.local]
admin = true
"""


@dataclass(frozen=True)
class Watched:
    daemon: Daemon
    metrics_url: str
    collector: Collector
    policy_path: Path

    def page(self) -> str:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the present value of one sample, None when there is none."""
        for family in text_string_to_metric_families(self.page()):
            for sample in family.samples:
                if sample.name == PREFIX + name and sample.labels == labels:
                    return float(sample.value)
        return None

    def reports(self, value: float, name: str, **labels: str) -> bool:
        """True when a sample reaches this value in time; a scrape soon after another repeats its values."""
        return eventually(lambda: self.value(name, **labels) == value)

    def write_policy(self, version: str) -> None:
        self.policy_path.write_text(POLICY.format(version=version))


@contextmanager
def watched_daemon(*, endpoint: str | None = None) -> Iterator[Watched]:
    """`endpoint`: where spans go in place of the collector."""
    directory = Path(tempfile.mkdtemp(prefix="w-"))
    policy_path, config = directory / "policy.toml", directory / "config.toml"
    policy_path.write_text(POLICY.format(version="1"))
    with collecting() as collector:
        sections = {
            "metrics": {"listen": "127.0.0.1:0"},
            "tracing": {"endpoint": endpoint or collector.endpoint},
            "policy": {"file": str(policy_path)},
        }
        lines = [
            line
            for name, keys in sections.items()
            for line in (f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()))
        ]
        config.write_text("\n".join(lines))
        with running_daemon(directory, "--config", str(config)) as daemon:
            yield Watched(daemon, _metrics_url(daemon), collector, policy_path)
    shutil.rmtree(directory)


def _metrics_url(daemon: Daemon) -> str:
    found = re.search(r'"address": "([^"]+)", "event": "metrics_listening"', daemon.log.read_text())
    assert found is not None, daemon.log.read_text()
    return f"http://{found[1]}/metrics"
