"""Writes the files that operators import: ops/grafana/*.json and ops/prometheus/alerts.yaml.

    python tools/ops.py [--check]

It also writes the table of alerts in docs/operations.md. `--check` writes nothing, and fails when a file is not what
would be written. tests/unit/test_ops.py checks that the metrics and labels exist.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pages import between_marks, write_or_check

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/operations.md"
BEGIN, END = "<!-- alerts: made by tools/ops.py -->\n", "<!-- end of alerts -->\n"
WIDTH, HEIGHT, COLUMNS = 8, 7, 3  # of a panel, in Grafana's grid of 24 columns


@dataclass(frozen=True)
class Panel:
    """A graph: its title, its unit as Grafana names it, and expressions with their legends.

    `@name` in an expression is short for the metric remote_executor_name.
    """

    title: str
    unit: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alert:
    name: str
    expression: str
    for_: str
    severity: str
    meaning: str


def _rate(metric: str, by: str) -> tuple[str, str]:
    return f"sum by ({by}) (rate(@{metric}[$__rate_interval]))", "{{" + by + "}}"


def _quantiles(metric: str, selector: str = "") -> tuple[tuple[str, str], ...]:
    rates = f"sum by (le) (rate(@{metric}_bucket{selector}[$__rate_interval]))"
    return tuple((f"histogram_quantile({share}, {rates})", f"p{share * 100:.0f}") for share in (0.5, 0.99))


OVERVIEW = (
    Panel("Sessions", "short", (("sum by (state) (@sessions)", "{{state}}"),)),
    Panel("Executions by outcome", "ops", (_rate("executions_total", "outcome"),)),
    Panel("Refused calls", "ops", (_rate("requests_refused_total", "reason"),)),
    Panel("Duration of executions", "s", _quantiles("execution_seconds")),
    Panel("Creation of sessions", "s", _quantiles("session_creation_seconds")),
    Panel(
        "Where time goes (p99)",
        "s",
        (
            (
                "histogram_quantile(0.99, sum by (le, phase) (rate(@phase_seconds_bucket[$__rate_interval])))",
                "{{phase}}",
            ),
        ),
    ),
    Panel(
        "Unfinished work",
        "short",
        (
            ("@executions_unfinished", "executions"),
            ("@processes_running", "processes"),
            ("sum(@rpc_open)", "calls"),
            ("@approvals_waiting", "approvals"),
        ),
    ),
    Panel("Ended sessions by reason", "ops", (_rate("sessions_ended_total", "reason"),)),
    Panel("Policy violations by kind", "ops", (_rate("policy_violations_total", "kind"),)),
    Panel("Approvals by decision", "ops", (_rate("approvals_total", "decision"),)),
    Panel(
        "Network of sandboxes",
        "Bps",
        (_rate("egress_bytes_total", "direction"),),
    ),
    Panel("Refused connections", "ops", (_rate("egress_denied_total", "reason"),)),
    Panel(
        "The daemon",
        "s",
        (*_quantiles("event_loop_lag_seconds"), ("rate(process_cpu_seconds_total[$__rate_interval])", "CPU")),
    ),
)
TENANTS = (
    Panel(
        "Share of quotas in use",
        "percentunit",
        (("@tenant_use / on (tenant, quota) @tenant_quota", "{{tenant}} {{quota}}"),),
    ),
    Panel("Use by quota", "short", (("@tenant_use", "{{tenant}} {{quota}}"),)),
    Panel("Tool calls by profile", "ops", (_rate("tool_calls_total", "profile"),)),
    Panel("Sessions by profile", "short", (("sum by (profile) (@sessions)", "{{profile}}"),)),
    Panel("Executions by profile", "ops", (_rate("executions_total", "profile"),)),
    Panel("Processes by profile", "ops", (_rate("processes_total", "profile"),)),
)
BACKENDS = (
    Panel("Sessions by backend", "short", (("sum by (backend) (@sessions)", "{{backend}}"),)),
    Panel("State of backends", "short", (("@backend_state == 1", "{{backend}} {{state}}"),)),
    Panel(
        "Warm sandboxes",
        "short",
        (("@pool_depth", "{{image}}"), ("@pool_size", "{{image}}, wanted"), ("@pool_making", "{{image}}, in creation")),
    ),
    Panel(
        "Sessions served by the pool",
        "percentunit",
        (
            (
                "sum by (image) (rate(@pool_hits_total[$__rate_interval])) / sum by (image) "
                "(rate(@pool_hits_total[$__rate_interval]) + rate(@pool_misses_total[$__rate_interval]))",
                "{{image}}",
            ),
        ),
    ),
    Panel("Fork server not used", "ops", (_rate("fork_server_fallbacks_total", "reason"),)),
    Panel(
        "Lost",
        "ops",
        (
            ("sum(rate(@sessions_lost_total[$__rate_interval]))", "sessions"),
            ("sum(rate(@pool_lost_total[$__rate_interval]))", "warm sandboxes"),
            ("sum(rate(@fleet_sessions_lost_total[$__rate_interval]))", "sessions of lost nodes"),
        ),
    ),
    Panel("Nodes", "short", (("sum by (state) (@fleet_nodes)", "{{state}}"),)),
    Panel("Placement of sessions", "s", _quantiles("fleet_placement_seconds")),
    Panel(
        "Package environments",
        "short",
        (("@environments", "there"), ("@environments_building", "being built"), ("@environments_queued", "waiting")),
    ),
)
DASHBOARDS = {"overview": OVERVIEW, "tenants": TENANTS, "backends": BACKENDS}

ALERTS = (
    Alert(
        "SandboxesDie",
        'sum(rate(@executions_total{outcome=~"lost|crashed"}[5m])) > 0',
        "5m",
        "warning",
        "sandboxes die; the log has the reasons",
    ),
    Alert(
        "AuditFailing",
        "@audit_failing == 1",
        "1m",
        "critical",
        "nothing is recorded; profiles with `fail_closed` refuse work",
    ),
    Alert(
        "RecordingsCut",
        'increase(@recordings_cut_total{reason=~"disk|slow|internal"}[15m]) > 0',
        "0m",
        "warning",
        "recordings of sessions are incomplete; the log has the reasons",
    ),
    Alert(
        "GuestProtocolViolated",
        "increase(@guest_protocol_violations_total[1h]) > 0",
        "0m",
        "critical",
        "code in a sandbox took over its supervisor, or there is a bug",
    ),
    Alert(
        "PolicyRefused",
        'increase(@policy_reloads_total{result="refused"}[15m]) > 0',
        "0m",
        "warning",
        "the policy file is invalid; the previous policy stays in force",
    ),
    Alert(
        "PrivateAddressResolved",
        'rate(@egress_denied_total{reason="refused_address"}[5m]) > 0',
        "0m",
        "warning",
        "a name resolved to an address of this network: a mistake in a zone, or an attack",
    ),
    Alert(
        "PoolBehind",
        "@pool_depth < @pool_size",
        "10m",
        "warning",
        "sandboxes can't be created, or not as fast as they are used",
    ),
    Alert(
        "BackendUnavailable",
        '@backend_state{state!="up"} == 1',
        "5m",
        "warning",
        "a backend is full or down; new sessions go to the next backend of their profile, if there is one",
    ),
    Alert(
        "QuotaNearlySpent",
        "@tenant_use / on (tenant, quota) @tenant_quota > 0.9",
        "10m",
        "warning",
        "a tenant is about to be refused",
    ),
    Alert(
        "EventLoopLags",
        "histogram_quantile(0.99, sum by (le) (rate(@event_loop_lag_seconds_bucket[5m]))) > 0.1",
        "5m",
        "warning",
        "the daemon lacks CPU",
    ),
    Alert(
        "SessionsFull",
        'rate(@requests_refused_total{reason="TOO_MANY_SESSIONS"}[5m]) > 0',
        "0m",
        "warning",
        "`sessions.max_sessions` is reached",
    ),
    Alert(
        "TokensTried",
        'sum(rate(@requests_refused_total{reason="UNAUTHENTICATED"}[5m])) > 1',
        "1m",
        "warning",
        "somebody tries tokens",
    ),
    Alert("NodesLost", "increase(@fleet_nodes_lost_total[15m]) > 0", "0m", "warning", "a node of the fleet was lost"),
)


def _full(expression: str) -> str:
    return expression.replace("@", "remote_executor_")


def dashboard(name: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """Returns a dashboard as Grafana imports it (schema version 36, Grafana 9 and later)."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "title": f"remote-executor: {name}",
        "uid": f"remote-executor-{name}",
        "tags": ["remote-executor"],
        "schemaVersion": 36,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {
            "list": [{"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus"}]
        },
        "panels": [
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "datasource": source,
                "gridPos": {
                    "x": number % COLUMNS * WIDTH,
                    "y": number // COLUMNS * HEIGHT,
                    "w": WIDTH,
                    "h": HEIGHT,
                },
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + index), "datasource": source, "expr": _full(line), "legendFormat": legend}
                    for index, (line, legend) in enumerate(panel.lines)
                ],
            }
            for number, panel in enumerate(panels)
        ],
    }


def rules() -> dict[str, Any]:
    """Returns the alerts as a file of Prometheus' rules."""
    return {
        "groups": [
            {
                "name": "remote-executor",
                "rules": [
                    {
                        "alert": f"RemoteExecutor{alert.name}",
                        "expr": _full(alert.expression),
                        "for": alert.for_,
                        "labels": {"severity": alert.severity},
                        "annotations": {"summary": alert.meaning[0].upper() + alert.meaning[1:] + "."},
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }


def _rows() -> Iterator[str]:
    yield "| Alert | Condition | For | Meaning |"
    yield "|---|---|---|---|"
    for alert in ALERTS:
        condition = _full(alert.expression).replace("|", "\\|")
        yield f"| {alert.name} | `{condition}` | {alert.for_} | {alert.meaning} |"


def files() -> dict[Path, str]:
    """Returns the content of each file under ops/."""
    written = {
        ROOT / f"ops/grafana/{name}.json": json.dumps(dashboard(name, panels), indent=2) + "\n"
        for name, panels in DASHBOARDS.items()
    }
    written[ROOT / "ops/prometheus/alerts.yaml"] = "# Made by tools/ops.py\n" + yaml.safe_dump(
        rules(), sort_keys=False, width=200
    )
    return written


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_or_check(path, text)
    write_or_check(PAGE, between_marks(PAGE, BEGIN, END, _rows()))
