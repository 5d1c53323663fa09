"""`executor-server`: serve, check-host, print-config.

What goes wrong is said in sentences on stderr. Exit codes: 0 done; 1 the host lacks something (check-host, serve);
2 wrong usage; 3 wrong configuration; 4 the state directory or an address can't be had.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from executor_server.backends.base import HostFinding
from executor_server.config import Config, load, to_toml
from executor_server.errors import SandboxFailure
from executor_server.settings import ConfigError

EXIT_HOST = 1
EXIT_CONFIG = 3
EXIT_PLACE = 4


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="remote-executor", prog_name="executor-server", message="%(prog)s %(version)s")
def main() -> None:
    """Runs Python for code agents, in sandboxes."""


def _configured(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say which configuration is in effect."""
    options = (
        click.option(
            "--config",
            "config_path",
            envvar="EXECUTOR_CONFIG",
            type=click.Path(path_type=Path, dir_okay=False),
            help="TOML file. Default: $EXECUTOR_CONFIG, else all defaults.",
        ),
        click.option(
            "--listen", multiple=True, metavar="ADDRESS", help="HOST:PORT or unix:/PATH; replaces server.listen."
        ),
        click.option("--backend", type=click.Choice(["local", "docker"]), help="What makes the sandboxes."),
        click.option(
            "--state-dir",
            type=click.Path(path_type=Path, file_okay=False),
            help="Default: $EXECUTOR_STATE_DIR, else ~/.local/state/remote-executor.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@_configured
def serve(**options: Any) -> None:
    """Runs the daemon until SIGTERM or SIGINT; the first drains, a second hurries."""
    config = _load(**options)
    # Imported here: the other commands need neither gRPC nor the session layer.
    from executor_server import app
    from executor_server.rpc.addresses import AddressError
    from executor_server.state_dir import StateDirError

    try:
        app.serve(config)
    except ConfigError as error:
        _fail_config(error)
    except (StateDirError, AddressError) as error:
        _fail(EXIT_PLACE, str(error))
    except SandboxFailure as error:
        _fail(EXIT_HOST, f"{error}\n`executor-server check-host` says more.")


@main.command("check-host")
@_configured
def check_host(**options: Any) -> None:
    """Says what this host can and can't isolate, and how to mend it."""
    config = _load(**options)
    from executor_server import app

    findings = app.check_host(config)
    for finding in findings:
        click.echo(_finding_text(finding))
    missing = [finding.subject for finding in findings if finding.required and not finding.ok]
    if missing:
        _fail(EXIT_HOST, f"The {config.server.backend} backend can't serve on this host: {', '.join(missing)}.")
    click.echo(f"The {config.server.backend} backend can serve on this host.")


@main.command("print-config")
@_configured
def print_config(**options: Any) -> None:
    """Prints the configuration that is in effect, as TOML."""
    click.echo(to_toml(_load(**options)), nl=False)


def _load(config_path: Path | None, listen: Sequence[str], backend: str | None, state_dir: Path | None) -> Config:
    server: dict[str, object] = {}
    if listen:
        server["listen"] = list(listen)
    if backend is not None:
        server["backend"] = backend
    if state_dir is not None:
        server["state_dir"] = state_dir.absolute()
    try:
        return load(config_path, {"server": server})
    except ConfigError as error:
        _fail_config(error)


def _fail_config(error: ConfigError) -> NoReturn:
    _fail(EXIT_CONFIG, "The configuration can't be used:\n" + "\n".join(f"  {line}" for line in error.problems))


def _finding_text(finding: HostFinding) -> str:
    verdict = "ok" if finding.ok else "MISSING" if finding.required else "weaker"
    text = f"{verdict:>7}  {finding.subject}: {finding.detail}"
    return f"{text}\n         {finding.remedy}" if finding.remedy and not finding.ok else text


def _fail(exit_code: int, text: str) -> NoReturn:
    click.echo(text, err=True)
    raise SystemExit(exit_code)
