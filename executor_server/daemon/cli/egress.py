"""`executor-server egress`: says what becomes of a connection before a sandbox tries it.

`check` decides as a session and its proxy would, resolves the name, and classifies the addresses. It connects to
nothing. It ends with 1 when the connection would be refused.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from executor_server.core import NetworkRules, Principal, secret_names
from executor_server.core.config import NAME_FORM, EgressSection, is_name
from executor_server.daemon.cli.policy_shared import policy_text, read_policy
from executor_server.daemon.cli.shared import load_config, placed, printable
from executor_server.guest.egress.addresses import AddressRules
from executor_server.guest.egress.host_names import BadName, HostPattern, LiteralAddress, Target, parse_authority
from executor_server.guest.egress.host_rules import Allowed, Rules
from executor_server.guest.egress.protocols import Resolver, Unresolved
from executor_server.network.egress import open_secrets
from executor_server.network.proxy import DnsResolver, HostResolver, OwnAddresses
from executor_server.policy import Policy, PolicySummary
from executor_server.policy.explain.explanation import Explanation, explain
from executor_server.policy.explain.question import Question
from executor_server.policy.explain.text import profile_text, refusal_lines

EXIT_REFUSED = 1
RESOLVE_S = 10.0


@dataclass(frozen=True)
class Header:
    """A header that the proxy sets in requests to the host."""

    name: str
    methods: tuple[str, ...]
    paths: tuple[str, ...]
    secrets: tuple[str, ...]
    problems: tuple[str, ...]  # sentences about files of its secrets


@dataclass(frozen=True)
class Found:
    """An address of the host, and why the proxy does not connect to it; empty when it does."""

    address: str
    refused: str
    advice: str = ""


@dataclass(frozen=True)
class Checked:
    """The answer, as `--json` has it."""

    target: str
    allowed: bool
    rule: str  # the pattern of the policy that covers it, and its key
    headers: tuple[Header, ...]
    resolver: str
    problem: str  # the reason for no addresses
    addresses: tuple[Found, ...]


@click.group()
def egress() -> None:
    """Checks connections of sessions."""


@egress.command()
@click.argument("target", metavar="HOST:PORT")
@click.option("--tenant", default="local", show_default=True, help="The session's tenant.")
@click.option("--policy", "file", type=click.Path(path_type=Path), help="Default: the configuration's.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@placed
def check(target: str, tenant: str, file: Path | None, as_json: bool, **options: Any) -> None:
    """Shows whether a tenant's sessions may connect to HOST:PORT, by which rule, and to which addresses.

    The name is resolved as [egress] of the configuration says, and each address is classified. Nothing is connected to.
    """
    if not is_name(tenant):
        raise click.BadParameter(f"must be {NAME_FORM}", param_hint="--tenant")
    wanted = _target(target)
    config = load_config(**options)
    path, data, found = read_policy(file, config)
    source = policy_text(data, found, config, options["config_path"])
    explanation = explain(source, tenant, Question(network=(str(wanted),)))
    checked = _checked(wanted, tenant, source.policy, explanation, config.egress)
    paths = (str(path), str(options["config_path"]))
    if as_json:
        refusals = [refusal.message for refusal in explanation.refusals]
        click.echo(json.dumps({**asdict(checked), "refusals": refusals}, indent=2))
    else:
        for line in _lines(checked, tenant, explanation, paths):
            click.echo(printable(line))
    if not checked.allowed:
        raise SystemExit(EXIT_REFUSED)


def _target(text: str) -> Target:
    try:
        return parse_authority(text)
    except LiteralAddress as error:
        if error.target is not None:  # a policy may list an address as such
            return error.target
        raise click.BadParameter(str(error), param_hint="HOST:PORT") from error
    except BadName as error:
        raise click.BadParameter(f"{text!r} {error}", param_hint="HOST:PORT") from error


# ---------------------------------------------------------------------------------------------------------------------
# Deciding


def _checked(target: Target, tenant: str, policy: Policy, explanation: Explanation, section: EgressSection) -> Checked:
    rule = "" if explanation.granted is None else _rule(target, policy.describe(Principal(tenant, "check")))
    headers = () if explanation.granted is None else tuple(_headers(target, explanation.granted.network, section))
    resolver, addresses, problem = _resolved(target, section)
    classifier = AddressRules(section.internal, OwnAddresses())
    found = tuple(_classified(address, classifier) for address in addresses)
    is_reached = any(not each.refused for each in found) or (section.upstream_resolves and not target.is_address)
    allowed = explanation.granted is not None and is_reached
    return Checked(str(target), allowed, rule, headers, resolver, problem, found)


def _rule(target: Target, summary: PolicySummary) -> str:
    """Returns the pattern in the policy; the rules of a session have the pattern that it asked for instead."""
    network = summary.network
    for patterns, key in (
        (network.default, "default, for every session"),
        (network.allowed, "allowed, for sessions that ask for it"),
        (network.rules.ask, "ask, after an approval"),
    ):
        for text in patterns:
            if HostPattern.parse(text).covers(target):
                return f"{text} of network.{key}"
    raise AssertionError(f"{target} was granted by no pattern")


def _headers(target: Target, network: NetworkRules, section: EgressSection) -> Iterator[Header]:
    decision = Rules.read(json.loads(json.dumps(asdict(network)))).decide(target)
    for secret in decision.secrets if isinstance(decision, Allowed) else ():
        names = secret_names(secret.value)
        files = {name: section.secrets[name] for name in names if name in section.secrets}
        with open_secrets(files) as (_, problems):
            yield Header(secret.header, secret.methods, secret.paths, names, tuple(problems))


def _resolved(target: Target, section: EgressSection) -> tuple[str, Sequence[str], str]:
    """Returns the resolver of the name, its addresses, and the reason if there are none."""
    if target.is_address:
        return "none: it is an address", (target.host,), ""
    if section.upstream_resolves:
        return f"the upstream proxy {section.upstream_proxy}, which is trusted with the addresses", (), ""
    resolver: Resolver = DnsResolver(section.resolver) if section.resolver else HostResolver()
    who = " then ".join(section.resolver) or "this host"
    try:
        addresses = asyncio.run(asyncio.wait_for(resolver.resolve(target.host), RESOLVE_S))
    except TimeoutError:
        return who, (), "did not answer in time"
    except (Unresolved, OSError) as error:
        return who, (), f"the name {error}" if isinstance(error, Unresolved) else "can't be asked now"
    return who, addresses, "" if addresses else "the name has no addresses"


def _classified(address: str, classifier: AddressRules) -> Found:
    refused = classifier.why_refused(address)
    if refused is None:
        return Found(address, "")
    alone = AddressRules((address,), lambda: ())
    opens = alone.why_refused(address) is None
    return Found(address, refused, "egress.internal of the configuration could open it" if opens else "")


# ---------------------------------------------------------------------------------------------------------------------
# Answering


def _lines(checked: Checked, tenant: str, explanation: Explanation, paths: tuple[str, str]) -> Iterator[str]:
    verdict = "allowed" if checked.allowed else "refused"
    yield f"{verdict} to tenant {tenant}, {profile_text(explanation)}: {checked.target}"
    if checked.rule:
        yield f"  rule: {checked.rule}"
    yield from refusal_lines(explanation.refusals, paths)
    for header in checked.headers:
        requests = f"{', '.join(header.methods) or 'all'} requests of {', '.join(header.paths) or 'all paths'}"
        yield f"  header: {header.name} in {requests}, with {', '.join(header.secrets)} of egress.secrets"
        yield from (f"    {problem}" for problem in header.problems)
    yield f"  resolver: {checked.resolver}" + (f"; {checked.problem}" if checked.problem else "")
    for found in checked.addresses:
        advice = f"; {found.advice}" if found.advice else ""
        yield f"  address: {found.address}" + (f", refused: it {found.refused}{advice}" if found.refused else "")
