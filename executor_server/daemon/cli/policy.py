"""`executor-server policy`: check, explain, diff.

`check` ends with 3 when the policy can't be used, `explain` with 1 when something is refused, `diff` with 1 when the
policies differ. The request of `explain` is JSON with the keys of policy.explain.question.Question.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from executor_server.core.config import NAME_FORM, ConfigError, is_name, read_bytes
from executor_server.daemon.cli.policy_shared import (
    fail_policy,
    parsed_policy,
    policy_text,
    read_policy,
)
from executor_server.daemon.cli.shared import configured, load_config
from executor_server.policy import PolicyFile, secrets_named, unserved
from executor_server.policy.explain.diff import differences
from executor_server.policy.explain.explanation import Explanation, Refusal, explain
from executor_server.policy.explain.question import Question, read_question
from executor_server.policy.explain.text import answer_lines, change_text

EXIT_DIFFERENT = 1
EXIT_REFUSED = 1
MAX_REQUEST_BYTES = 1 << 20

_FILE = click.argument("file", required=False, type=click.Path(path_type=Path))


@click.group()
def policy() -> None:
    """Checks, explains and compares policy files."""


@policy.command()
@_FILE
@configured
def check(file: Path | None, **options: Any) -> None:
    """Lists all errors of a policy FILE (default: the configuration's).

    With --config, or $EXECUTOR_CONFIG, that includes what such a daemon could not serve.
    """
    config = load_config(**options)
    path, _, found = read_policy(file, config)
    has_config = options["config_path"] is not None
    problems = [str(problem) for problem in unserved(found, config)] if has_config else []
    if problems:
        fail_policy(path, problems)
    click.echo(f"{path or 'The built-in policy'} can be used.")
    for line in _summary(found):
        click.echo(line)
    if not has_config and (names := secrets_named(found)):
        click.echo(f"not checked  secrets of the configuration, as there is no --config: {', '.join(names)}")


@policy.command("explain")
@_FILE
@click.option("--tenant", required=True, help="The tenant of the request.")
@click.option("--request", "request_", required=True, metavar="JSON|@FILE|-", help="The request.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@configured
def explain_(file: Path | None, tenant: str, request_: str, as_json: bool, **options: Any) -> None:
    """Shows whether a tenant's request would be granted, and which lines of FILE refuse it.

    \b
    The request is JSON with some of these keys:
      image, backend, authorized_imports, limits, network, packages, labels, prelude    a session
      execution                            limits of one execution in it
      tools                                names of tools that the client answers
      sandbox_tools                        names of tools that are shipped into the sandbox
      put_file, get_file                   {"size_bytes": N, "so_far": HOW_MANY_BEFORE}
      imports                              modules that code imports
      connections                          hosts and ports that code connects to
      language                             rules that code was refused for
      usage                                what the tenant would have or have used: keys of [quotas]
    """
    if not is_name(tenant):
        raise click.BadParameter(f"must be {NAME_FORM}", param_hint="--tenant")
    config = load_config(**options)
    path, data, found = read_policy(file, config)
    source = policy_text(data, found, config, options["config_path"])
    explanation = explain(source, tenant, _question(request_))
    paths = (str(path), str(options["config_path"]))
    if as_json:
        click.echo(json.dumps(_as_json(explanation, paths), indent=2))
    else:
        for line in answer_lines(explanation, tenant, paths):
            click.echo(line)
    if explanation.refusals:
        raise SystemExit(EXIT_REFUSED)


@policy.command()
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def diff(old: Path, new: Path, as_json: bool) -> None:
    """Shows what changes from policy OLD to NEW, and whether each change loosens or tightens it."""
    changes = differences(parsed_policy(old), parsed_policy(new))
    if as_json:
        click.echo(json.dumps([asdict(change) for change in changes], indent=2))
    else:
        for change in changes:
            click.echo(change_text(change))
    if changes:
        raise SystemExit(EXIT_DIFFERENT)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def _question(request: str) -> Question:
    try:
        return read_question(_request_text(request))
    except ConfigError as error:
        raise click.BadParameter("; ".join(error.problems), param_hint="--request") from error


def _request_text(request: str) -> str:
    if request == "-":
        return sys.stdin.read(MAX_REQUEST_BYTES)
    if not request.startswith("@"):
        return request
    try:
        return read_bytes(Path(request[1:]), "request").decode()
    except ConfigError as error:
        raise click.BadParameter(error.problems[0], param_hint="--request") from error


# ---------------------------------------------------------------------------------------------------------------------
# Answering


def _summary(file: PolicyFile) -> Iterator[str]:
    yield f"version      {file.version}"
    yield f"fingerprint  {file.fingerprint}"
    yield f"default      {file.default or 'none: unlisted tenants are refused'}"
    for name, profile in file.profiles.items():
        extends = f" (extends {profile.extends})" if profile.extends else ""
        yield f"profile      {name}{extends}"
    for name, tenant in file.tenants.items():
        admin = ", admin" if tenant.admin else ""
        yield f"tenant       {name}: profile {tenant.profile or file.default}{admin}"


def _as_json(explanation: Explanation, paths: tuple[str, str]) -> dict[str, Any]:
    return {
        "granted": asdict(explanation.granted) if explanation.granted is not None else None,
        "profiles": list(explanation.lineage),
        "approvals": [_refusal_as_json(approval, paths) for approval in explanation.approvals],
        "refusals": [_refusal_as_json(refusal, paths) for refusal in explanation.refusals],
    }


def _refusal_as_json(refusal: Refusal, paths: tuple[str, str]) -> dict[str, Any]:
    violation, line = refusal.violation, refusal.place.line
    return {
        "message": refusal.message,
        "violation": None if violation is None else {**asdict(violation), "kind": violation.kind.value},
        "advice": refusal.place.advice,
        "file": paths[refusal.place.is_in_config] if line is not None else None,
        "line": line.number if line is not None else None,
        "text": line.text if line is not None else None,
    }
