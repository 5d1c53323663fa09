"""`executor-server token`: makes, lists and revokes the tokens of tenants.

A running daemon applies changes within a second. A new token is all that is written to stdout, so that it can be piped
to its destination; it cannot be shown again.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import click

from executor_server.core.config import NAME_FORM, Config, ConfigError, StateDir, is_name
from executor_server.daemon.cli.shared import EXIT_PLACE, fail, fail_config, load_config, placed, print_table, span_of
from executor_server.policy import load_policy
from executor_server.policy.identity import Role, TokenFile, TokenFileError, TokenForm, TokenRecord, effective_roles

MAX_LIFETIME = timedelta(days=3650)
DEFAULT_NAME = "default"
EXIT_UNKNOWN = 1


def _name(_context: click.Context, _option: click.Parameter, value: str | None) -> str | None:
    if value is not None and not is_name(value):
        raise click.BadParameter(f"must be {NAME_FORM}")
    return value


def _lifetime(_context: click.Context, _option: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    lifetime = span_of(value)
    if lifetime is None or lifetime > MAX_LIFETIME:
        raise click.BadParameter(f"must be like 90m, 12h, 30d or 8w, and at most {MAX_LIFETIME.days}d")
    return lifetime


@click.group()
def token() -> None:
    """Makes, lists and revokes the tokens of tenants."""


@token.command()
@click.option("--tenant", required=True, callback=_name, help="The tenant of the token.")
@click.option("--name", default=DEFAULT_NAME, callback=_name, help="Purpose; shown in lists and in the audit log.")
@click.option(
    "--expires",
    metavar="TIME",
    callback=_lifetime,
    help="Validity: 90m, 12h, 30d, 8w. Default: until revoked.",
)
@click.option(
    "--form", type=click.Choice(get_args(TokenForm)), default="ret", help="`e2b`: as E2B's SDKs require. Default: ret."
)
@click.option("--admin", is_flag=True, help="Allow admin calls, which concern all tenants.")
@click.option(
    "--role",
    "roles",
    type=click.Choice(get_args(Role)),
    multiple=True,
    help="What the token allows; repeatable. `user`: has sessions (default). `approver`: decides requests that need an "
    "approval. `viewer`: watches sessions.",
)
@placed
def new(
    tenant: str,
    name: str,
    expires: timedelta | None,
    admin: bool,
    roles: tuple[Role, ...],
    form: TokenForm,
    **place: Any,
) -> None:
    """Makes a token and prints it, once."""
    if admin and roles:
        raise click.UsageError(
            "--admin includes every role: omit --role, or omit --admin for a token with fewer rights"
        )
    config = load_config(**place)
    # First, since it may end the process: a token that was made and not shown would be lost.
    _warn_unknown_tenant(tenant, config)
    file = TokenFile(_path_of(config))
    expire_time = datetime.now(UTC).replace(microsecond=0) + expires if expires is not None else None
    try:
        record, secret = file.new(tenant, name, expire_time=expire_time, admin=admin, roles=roles, form=form)
    except TokenFileError as error:
        fail(EXIT_PLACE, str(error))
    click.echo(f"Token {record.id} of tenant {tenant}, {_validity(record)}. It is not shown again.", err=True)
    click.echo(secret)


@token.command("list")
@click.option("--tenant", callback=_name, help="Only of this tenant.")
@placed
def list_tokens(tenant: str | None, **place: Any) -> None:
    """Lists the tokens, without their secrets."""
    records = _read(TokenFile(_path_of(load_config(**place))))
    shown = [record for record in records if tenant is None or record.tenant == tenant]
    rows = [("ID", "TENANT", "NAME", "ADMIN", "ROLES", "CREATED", "VALIDITY")]
    rows += [
        (
            r.id,
            r.tenant,
            r.name,
            "yes" if r.admin else "no",
            "all" if r.admin else ", ".join(effective_roles(r.roles)),
            f"{r.create_time:%Y-%m-%d %H:%M}",
            _validity(r),
        )
        for r in shown
    ]
    print_table(rows)


@token.command()
@click.argument("token_id", metavar="ID")
@placed
def revoke(token_id: str, **place: Any) -> None:
    """Makes a token useless, for good; what runs with it is cut off."""
    path = _path_of(load_config(**place))
    try:
        record = TokenFile(path).revoke(token_id)
    except TokenFileError as error:
        fail(EXIT_PLACE, str(error))
    if record is None:
        fail(EXIT_UNKNOWN, f"No token with this id in {path}; list them with `executor-server token list`.")
    click.echo(f"Token {record.id} of tenant {record.tenant} is {_validity(record)}.", err=True)


def _path_of(config: Config) -> Path:
    return config.server.token_file or StateDir(config.server.state_dir).tokens_path


def _read(file: TokenFile) -> tuple[TokenRecord, ...]:
    try:
        return file.read()
    except TokenFileError as error:
        fail(EXIT_PLACE, str(error))


def _validity(record: TokenRecord) -> str:
    if record.revoke_time is not None:
        return f"revoked at {record.revoke_time:%Y-%m-%d %H:%M} UTC"
    if record.expire_time is None:
        return "valid until it is revoked"
    verb = "valid until" if record.is_valid(datetime.now(UTC)) else "expired at"
    return f"{verb} {record.expire_time:%Y-%m-%d %H:%M} UTC"


def _warn_unknown_tenant(tenant: str, config: Config) -> None:
    try:
        policy = load_policy(config.policy.file)
    except ConfigError as error:
        fail_config(error)
    if tenant not in policy.tenants and policy.default is None:
        click.echo(
            f"The policy {config.policy.file} neither lists the tenant {tenant} nor has a default profile, so this "
            f"token can't make sessions yet: add [tenants.{tenant}] there.",
            err=True,
        )
