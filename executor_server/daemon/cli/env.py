"""`executor-server env`: the environments of packages that a running daemon has made, and the disk space they take.

The options that say where the daemon is, and the exit codes, are those of `executor-server admin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from executor_api.sizes import bytes_of
from executor_server.daemon.cli.calling import asked, number_of, print_json, reached, time_of
from executor_server.daemon.cli.shared import print_table, printable

_CELL_CHARS = 48
_BYTES_MAX = 2**63 - 1


@click.group()
def env() -> None:
    """Lists, shows and removes environments of packages."""


@env.command("list")
@reached
def list_environments(as_json: bool, **access: Any) -> None:
    """Lists the environments, the last used first, and running builds."""
    answer = asked(access, lambda client: client.environments())
    if as_json:
        print_json(answer)
        return
    rows: list[tuple[str, ...]] = [("ENVIRONMENT", "SIZE", "IN USE", "LAST USE", "TENANTS", "IMAGES", "PACKAGES")]
    rows += [_row(each) for each in answer["environments"]]
    print_table(rows)
    if answer["builds"]:
        click.echo()
        making = [("BEING MADE", "FOR", "TENANT", "SINCE", "PACKAGES")]
        for each in answer["builds"]:
            since = f"{number_of(round(each['age_s']))} s"
            packages = _cut(_requested(each["packages"]))
            making.append((each["progress"], each["image"], each["tenant"] or "-", since, packages))
        print_table(making)
    click.echo()
    click.echo(f"On the disk: {number_of(answer['total_bytes'])} of {number_of(answer['max_bytes'])} bytes.")


@env.command()
@click.argument("environment_id", metavar="ID")
@reached
def show(environment_id: str, as_json: bool, **access: Any) -> None:
    """Shows the users and the packages of an environment; --json adds the hashes of its lock."""
    answer = asked(access, lambda client: client.environment(environment_id))
    if as_json:
        print_json(answer)
        return
    environment = answer["environment"]
    requests = [_requested(each["packages"]) for each in environment["requests"]]
    print_table(
        [
            ("environment", environment["environment_id"]),
            ("size", f"{number_of(environment['size_bytes'])} bytes"),
            ("made", time_of(environment, "create_time")),
            ("last use", time_of(environment, "use_time")),
            ("sandboxes", number_of(environment["sandboxes"])),
            ("tenants", _list(environment["tenants"])),
            ("images", _list(environment["images"])),
            ("python", f"{answer['interpreter']}, {answer['platform']}"),
            ("uv", answer["uv_version"]),
            ("asked for as", "; ".join(requests) or "-"),
            ("modules", _list(answer["modules"])),
            ("lock", f"sha256:{answer['lock_sha256']}"),
        ]
    )
    click.echo()
    for line in answer["lock"].splitlines():
        if pin := line.partition("--hash")[0].rstrip(" \\"):  # a package has a hash for each of its files
            click.echo(printable(pin))


@env.command()
@click.option("--max-bytes", default="0", metavar="SIZE", help="Bytes to keep, such as 2GB. Default: 0.")
@reached
def gc(max_bytes: str, as_json: bool, **access: Any) -> None:
    """Removes unused environments, the least recently used first.

    Packages whose environment could not be made may be tried again from then on.
    """
    try:
        most = min(bytes_of(max_bytes), _BYTES_MAX)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--max-bytes") from error
    answer = asked(access, lambda client: client.collect_environments(most))
    if as_json:
        print_json(answer)
        return
    for environment_id in answer["environment_ids"]:
        click.echo(printable(environment_id))
    removed = f"{len(answer['environment_ids'])} environments removed"
    freed, left = number_of(answer["freed_bytes"]), number_of(answer["total_bytes"])
    click.echo(f"{removed}, {freed} bytes freed, {left} left on the disk.")


def _row(environment: Mapping[str, Any]) -> tuple[str, ...]:
    requests = [_requested(each["packages"]) for each in environment["requests"]]
    return (
        environment["environment_id"],
        number_of(environment["size_bytes"]),
        number_of(environment["sandboxes"]),
        time_of(environment, "use_time"),
        _cut(_list(environment["tenants"])),
        _cut(_list(environment["images"])),
        _cut("; ".join(requests) or _list(environment["pins"])),
    )


def _requested(packages: Sequence[str]) -> str:
    return ", ".join(packages) or "all of the lock"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "-"


def _cut(text: str) -> str:
    return text if len(text) <= _CELL_CHARS else f"{text[: _CELL_CHARS - 1]}…"
