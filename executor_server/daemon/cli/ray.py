"""`executor-server ray`: a fleet on a Ray cluster, or on one started on this machine. Needs the extra `ray`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from executor_server.core.config import ConfigError, default_state_dir, read_trusted
from executor_server.daemon.cli.shared import EXIT_PLACE, fail, fail_config, print_table, printable
from executor_server.fleet.ray import FleetError
from executor_server.fleet.ray.commands import Plan, down, status, up
from executor_server.fleet.ray.layout import FleetFiles

EXIT_RAY = 1
MAX_LOCAL_NODES = 16

_ADDRESS = click.option(
    "--address",
    envvar="RAY_ADDRESS",
    help="`auto` on a machine of a cluster, or HOST:PORT of its head. Default: a cluster of this machine alone, which "
    "`up` makes.",
)
_STATE_DIR = click.option(
    "--state-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of the fleet, on each machine. Default: `ray` in $EXECUTOR_STATE_DIR, else in "
    "~/.local/state/remote-executor.",
)


def _labels(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in values:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{text!r} must be KEY=VALUE")
        found[key] = value
    return found


@click.group()
def ray() -> None:
    """Starts, shows and stops a fleet on Ray."""


@ray.command("up")
@_ADDRESS
@click.option(
    "--nodes", type=click.IntRange(1, MAX_LOCAL_NODES), default=3, show_default=True, help="Without --address."
)
@_STATE_DIR
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file for the front and the nodes. Files that it names must be there on each machine.",
)
@click.option(
    "--front-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder of the front, on storage that all machines share: Ray may start the front on another one then.",
)
@click.option("--label", "selector", multiple=True, callback=_labels, help="KEY=VALUE that a node of Ray must have.")
def start(
    address: str | None,
    nodes: int,
    state_dir: Path | None,
    config_path: Path | None,
    front_dir: Path | None,
    selector: Mapping[str, str],
) -> None:
    """Starts a front, and a node on each of Ray's nodes; waits until they serve."""
    files = _files(state_dir)
    try:
        text = read_trusted(config_path, "configuration file").decode() if config_path is not None else ""
        front = front_dir.absolute() if front_dir is not None else None
        plan = Plan(files, text, address, nodes, front, selector)
        found = _done(lambda: up(plan, _say))
    except ConfigError as error:
        fail_config(error)
    except UnicodeDecodeError:
        fail(EXIT_PLACE, f"The configuration file {config_path} is not UTF-8.")
    _show(found)
    click.echo(f"\nFor clients on this machine: export EXECUTOR_STATE_DIR={Path(found['directory']) / 'state'}")


@ray.command("status")
@_ADDRESS
@_STATE_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def show(address: str | None, state_dir: Path | None, as_json: bool) -> None:
    """Shows the front, and the daemon on each of Ray's nodes."""
    found = _done(lambda: status(_files(state_dir), address))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


@ray.command("down")
@_ADDRESS
@_STATE_DIR
def stop(address: str | None, state_dir: Path | None) -> None:
    """Ends the front and the nodes with their sessions, and the Ray that `up` has started. Their folders stay."""
    _done(lambda: down(_files(state_dir), address, _say))
    click.echo("The fleet has ended.")


def _files(state_dir: Path | None) -> FleetFiles:
    return FleetFiles((state_dir or default_state_dir() / "ray").absolute())


def _done(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except FleetError as error:
        fail(EXIT_RAY, "\n".join(printable(line) for line in str(error).split("\n")))


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


def _show(found: Mapping[str, Any]) -> None:
    process = f"process {found['pid']}" if found["pid"] else "no process"
    click.echo(f"front: {process}, {found['directory']}" + (f"; {found['problem']}" if found["problem"] else ""))
    by_name = {node["node"]: node for node in found["fleet"].get("nodes", ())}
    rows = [("NODE", "HOST", "PROCESS", "LINK", "STATE", "SESSIONS", "RAY NODE", "PROBLEM")]
    for node in sorted(found["nodes"], key=lambda each: str(each["name"])):
        seen = by_name.get(node["name"], {})
        rows.append(
            (
                node["name"] or "-",
                node["host"] or "-",
                str(node.get("pid") or "-"),
                node.get("link") or "-",
                str(seen.get("state", "-")).removeprefix("NODE_STATE_").lower(),
                f"{seen['sessions']}/{seen['max_sessions']}" if seen else "-",
                node["ray_node"][:12] or "-",
                node["problem"] or str(seen.get("problem", "")),
            )
        )
    print_table(rows)
