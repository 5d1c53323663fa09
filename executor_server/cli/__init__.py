"""`executor-server`: serve, check-host, print-config, and the groups of commands in the files beside this one.

What goes wrong is said in sentences on stderr. Exit codes: 0 done; 1 the host lacks something (check-host, serve);
2 wrong usage; 3 wrong configuration or policy; 4 the state directory, a file of it or an address can't be had; 5 an
audit log that is not whole (audit verify). `policy diff` and `policy explain` say their own.
"""

from __future__ import annotations

from typing import Any

import click

from executor_server.backends.base import HostFinding
from executor_server.cli.admin import admin
from executor_server.cli.audit import audit
from executor_server.cli.images import images
from executor_server.cli.policy import policy
from executor_server.cli.shared import (
    EXIT_CONFIG,
    EXIT_HOST,
    EXIT_PLACE,
    configured,
    fail,
    fail_config,
    load_config,
)
from executor_server.cli.token import token
from executor_server.config import Config, to_toml
from executor_server.errors import SandboxFailure
from executor_server.settings import ConfigError

__all__ = ["EXIT_CONFIG", "EXIT_HOST", "EXIT_PLACE", "main"]


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="remote-executor", prog_name="executor-server", message="%(prog)s %(version)s")
def main() -> None:
    """Runs Python for code agents, in sandboxes."""


main.add_command(admin)
main.add_command(audit)
main.add_command(images)
main.add_command(policy)
main.add_command(token)


@main.command()
@configured
def serve(**options: Any) -> None:
    """Runs the daemon until SIGTERM or SIGINT; the first drains, a second hurries."""
    config = load_config(**options)
    # Imported here: the other commands need neither gRPC nor the session layer.
    from executor_server import app
    from executor_server.audit_files import AuditDirError
    from executor_server.rpc.addresses import AddressError
    from executor_server.state_dir import StateDirError

    try:
        app.serve(config)
    except ConfigError as error:
        fail_config(error)
    except (StateDirError, AddressError, AuditDirError) as error:
        fail(EXIT_PLACE, str(error))
    except SandboxFailure as error:
        fail(EXIT_HOST, f"{error}\n`executor-server check-host` says more.")


@main.command("check-host")
@configured
def check_host(**options: Any) -> None:
    """Says of each backend that is configured what it can and can't isolate here, and how to mend it."""
    config = load_config(**options)
    verdicts = [_checked(config.alone(backend)) for backend in config.server.backends]
    if not all(verdicts):
        raise SystemExit(EXIT_HOST)


def _checked(config: Config) -> bool:
    """Says what its one backend can do on this host; whether it can serve."""
    from executor_server import app

    findings = app.check_host(config)
    for finding in findings:
        click.echo(_finding_text(finding))
    missing = [finding.subject for finding in findings if finding.required and not finding.ok]
    if missing:
        text = f"The {config.server.backend} backend can't serve on this host: {', '.join(missing)}."
        click.echo(text, err=True)
    else:
        click.echo(f"The {config.server.backend} backend can serve on this host.")
    return not missing


@main.command("print-config")
@configured
def print_config(**options: Any) -> None:
    """Prints the configuration that is in effect, as TOML."""
    click.echo(to_toml(load_config(**options)), nl=False)


def _finding_text(finding: HostFinding) -> str:
    verdict = "ok" if finding.ok else "MISSING" if finding.required else "weaker"
    text = f"{verdict:>7}  {finding.subject}: {finding.detail}"
    return f"{text}\n         {finding.remedy}" if finding.remedy and not finding.ok else text
