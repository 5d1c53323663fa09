"""`executor-server`: serve, check-host, print-config, and the groups of commands in the modules of this package.

Problems are reported in sentences on stderr. Exit codes: 0 done; 1 the host lacks something (check-host, serve);
2 wrong usage; 3 wrong configuration or policy; 4 the state directory, a file of it or an address can't be used, or the
disk of the output is full; 5 an audit log that is not whole (audit verify); 130 interrupted. `policy diff` and `policy
explain` have codes of their own.
"""

from __future__ import annotations

import os
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from executor_api.disk import is_disk_full
from executor_server.core import SandboxFailure
from executor_server.core.config import ConfigError, to_toml
from executor_server.daemon.cli.admin import admin
from executor_server.daemon.cli.images import images
from executor_server.daemon.cli.shared import (
    EXIT_CONFIG,
    EXIT_HOST,
    EXIT_INTERRUPTED,
    EXIT_PLACE,
    configured,
    fail,
    fail_config,
    fronting,
    load_config,
    read_config,
    start_collector,
)
from executor_server.daemon.cli.web import console, gateway

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor_server.backends import HostFinding

LATE_GROUPS = {
    "audit": "Verifies and shows the audit log.",
    "egress": "Checks connections of sessions.",
    "env": "Lists, shows and removes environments of packages.",
    "fleet": "Creates the certificates of a fleet, and shows its nodes.",
    "policy": "Checks, explains and compares policy files.",
    "ray": "Starts, shows and stops a fleet on Ray.",
    "token": "Makes, lists and revokes the tokens of tenants.",
}
"""Groups of commands that are imported when one of their commands runs: the module of each, and its help."""


_USERINFO = re.compile(r'(https?://)[^\s"/]*@')
_IMPORTING = {"serve", "front", "check-host", "gateway", "console"}
"""Commands that import the daemon, and start the garbage collector afterwards."""


class _Unloaded(click.Command):
    """Stands for a group of commands whose module is not imported: enough for `--help`."""


class _Main(click.Group):
    """Imports the late groups when they are used.

    They import structlog and the models of the policy file, which takes as much CPU time as all other imports of
    `--help`.
    """

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().get_command(ctx, cmd_name)
        return _Unloaded(cmd_name, help=LATE_GROUPS[cmd_name]) if found is None and cmd_name in LATE_GROUPS else found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *LATE_GROUPS])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(command, _Unloaded):
            command = getattr(import_module(f"executor_server.daemon.cli.{name}"), str(name))
            assert isinstance(command, click.Group), name
        return name, command, rest

    def main(self, *args: Any, **more: Any) -> Any:
        """Ends with a sentence if the disk of stdout is full. click would print a traceback."""
        try:
            return super().main(*args, **more)
        except OSError as error:
            if not is_disk_full(error):
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again at exit
            where = error.filename or "A file or the output"
            text = f"{where} can't be written: {error.strerror}; free some space there, or choose another place."
            fail(EXIT_PLACE, text)

    def invoke(self, ctx: click.Context) -> Any:
        """Ends quietly on Ctrl-C, also during imports. click would print "Aborted!" and exit with 1."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            ctx.exit(EXIT_INTERRUPTED)


@click.group(cls=_Main, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="remote-executor", prog_name="executor-server", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Runs Python for code agents, in sandboxes."""
    if ctx.invoked_subcommand not in _IMPORTING:
        start_collector()


main.add_command(admin)
main.add_command(console)
main.add_command(gateway)
main.add_command(images)


@main.command()
@configured
@click.option(
    "--policy",
    "policy_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Policy file; replaces policy.file. Default: the built-in policy.",
)
@click.option("--for-process", "owner_pid", type=int, hidden=True)
def serve(owner_pid: int | None, **options: Any) -> None:
    """Runs the daemon until SIGTERM or SIGINT; the first signal drains, a second one stops at once."""
    config = load_config(**options)
    if config.fleet.role == "front":
        fail(EXIT_CONFIG, "The configuration is that of a front; run: executor-server front")
    # Imported here: the other commands need neither gRPC nor the session layer.
    from executor_server.core import AddressError
    from executor_server.core.config import StateDirError
    from executor_server.daemon import daemon
    from executor_server.policy.audit import AuditDirError

    start_collector()
    try:
        daemon.serve(config, owner_pid)
    except ConfigError as error:
        fail_config(error)
    except (StateDirError, AddressError, AuditDirError) as error:
        fail(EXIT_PLACE, str(error))
    except SandboxFailure as error:
        fail(EXIT_HOST, f"{error}\nRun `executor-server check-host` for details.")


@main.command()
@fronting
def front(**options: Any) -> None:
    """Runs the front of a fleet, which places sessions on the nodes in [fleet]."""
    options["fleet"] = {"role": "front"}
    config = load_config(**options)
    # Imported here, as above.
    from executor_server.core import AddressError
    from executor_server.core.config import StateDirError
    from executor_server.fleet.daemons import front
    from executor_server.policy.audit import AuditDirError

    start_collector()
    try:
        front.serve_front(config, partial(read_config, **options))
    except ConfigError as error:
        fail_config(error)
    except (StateDirError, AddressError, AuditDirError) as error:
        fail(EXIT_PLACE, str(error))


@main.command("check-host")
@configured
def check_host(**options: Any) -> None:
    """Reports what each configured backend can isolate on this host, and how to fix what it can't."""
    config = load_config(**options)
    from executor_server.daemon import daemon

    start_collector()
    verdicts = [_report(backend, daemon.check_host(config, backend)) for backend in config.server.backends]
    if not all(verdicts):
        raise SystemExit(EXIT_HOST)


def _report(backend: str, findings: Sequence[HostFinding]) -> bool:
    """Prints the findings about a backend; True when it can serve on this host."""
    for finding in findings:
        click.echo(_finding_text(finding))
    missing = [finding.subject for finding in findings if finding.required and not finding.ok]
    if missing:
        text = f"The {backend} backend can't serve on this host: {', '.join(missing)}."
        click.echo(text, err=True)
    else:
        click.echo(f"The {backend} backend can serve on this host.")
    return not missing


@main.command("print-config")
@configured
def print_config(**options: Any) -> None:
    """Prints the effective configuration as TOML, without users and passwords of URLs."""
    click.echo(_USERINFO.sub(r"\1…@", to_toml(load_config(**options))), nl=False)


def _finding_text(finding: HostFinding) -> str:
    verdict = "ok" if finding.ok else "MISSING" if finding.required else "weaker"
    text = f"{verdict:>7}  {finding.subject}: {finding.detail}"
    return f"{text}\n         {finding.remedy}" if finding.remedy and not finding.ok else text
