"""Compares a policy with a configuration: finds grants that a daemon with this configuration can't serve.

A daemon starts with such a policy and warns, since daemons with different backends may share one file. `policy check`
compares one configuration, and reports such grants as problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import get_args

from executor_server.core import secret_names
from executor_server.core.config import BackendName, Config, ConfigError, KeyPath, Problem, some_of
from executor_server.policy.decide import Policy
from executor_server.policy.file import PolicyFile
from executor_server.policy.network import BACKENDS_WITHOUT_SECRETS
from executor_server.policy.packages_table import PackagesTable
from executor_server.policy.profile import Profile


def configured_images(config: Config, backend: BackendName) -> tuple[str, ...]:
    """Returns the names of a backend's images; the first is its default."""
    images: Mapping[BackendName, Mapping[str, object]] = {
        "local": config.local.images,
        "docker": config.docker.images,
        "e2b": config.e2b.images,
    }
    return tuple(images[backend])


def policy_for(
    file: PolicyFile, config: Config, *, more_images: Sequence[str] = (), knows_secrets: bool = True
) -> Policy:
    """Returns the policy as a daemon of this configuration would have it.

    Without a configuration file, pass `more_images` and `knows_secrets=False`: the daemon then counts as having the
    images, the secrets and the index that the policy names.
    """
    server = config.server
    return Policy(
        file,
        images=tuple(dict.fromkeys((*configured_images(config, server.backend), *more_images))),
        backend=server.backend,
        other_images={other: configured_images(config, other) for other in server.other_backends},
        orphan_time_s=config.sessions.orphan_time_s,
        secrets=config.egress.secrets.keys() if knows_secrets else None,
        own_index=config.environments.has_own_index or not knows_secrets,
    )


def unserved(file: PolicyFile, config: Config) -> list[Problem]:
    """Finds grants that a daemon of this configuration can't serve, and warm sandboxes that the policy refuses."""
    problems = unserved_profiles(file, config)
    try:
        policy_for(file, config).warm_sandboxes(config.pool)
    except ConfigError as error:
        problems += [Problem((), text) for text in error.problems]
    return problems


def unserved_profiles(file: PolicyFile, config: Config) -> list[Problem]:
    """Finds grants of profiles that a daemon of this configuration can't serve.

    An inherited grant is reported for the ancestor only.
    """
    problems = []
    for name, profile in file.profiles.items():
        parent = file.profiles.get(profile.extends) if profile.extends is not None else None
        inherited = () if parent is None else tuple(_unserved(profile.extends or "", parent, config))
        texts = {problem.text for problem in inherited}
        problems += [problem for problem in _unserved(name, profile, config) if problem.text not in texts]
    return problems


def _unserved(name: str, profile: Profile, config: Config) -> Iterator[Problem]:
    sandbox, running = profile.sandbox, config.server.backends
    path = ("profiles", name, "sandbox")
    known = dict.fromkeys(image for backend in get_args(BackendName) for image in configured_images(config, backend))
    for image in sandbox.images or ():
        if image not in known:
            yield Problem((*path, "images"), f"the configuration has no image {image!r}; available: {some_of(known)}")
    listed = (config.server.backend,) if sandbox.backends is None else sandbox.backends
    served = [backend for backend in listed if backend in running]
    if not served:
        have = "backend is" if len(running) == 1 else "backends are"
        text = f"the daemon's {have} {' and '.join(map(repr, running))}, so it can serve none of these sessions"
        yield Problem((*path, "backends"), text)
        return
    for backend in listed:
        if backend not in running:
            text = f"the daemon does not run the {backend} backend (server.other_backends), so no session goes there"
            yield Problem((*path, "backends"), text)
    yield from _unserved_network(profile, (*path[:2], "network"), served, config)
    yield from _unserved_packages(profile.packages, (*path[:2], "packages"), config)
    images = dict.fromkeys(image for backend in served for image in configured_images(config, backend))
    if sandbox.images is not None and not set(sandbox.images) & set(images):
        whose = f"the {served[0]} backend" if len(served) == 1 else f"the backends {' and '.join(served)}"
        text = f"{whose} has none of these images, so no session can be served; available: {some_of(images)}"
        yield Problem((*path, "images"), text)


def secrets_named(file: PolicyFile) -> tuple[str, ...]:
    """Returns the names of the secrets that a policy needs from the configuration."""
    secrets = (secret for profile in file.profiles.values() for secret in profile.network.secrets)
    return tuple(dict.fromkeys(name for secret in secrets for name in secret_names(secret.value)))


def _unserved_network(profile: Profile, path: KeyPath, served: Sequence[str], config: Config) -> Iterator[Problem]:
    secrets, known = profile.network.secrets, config.egress.secrets
    for name in dict.fromkeys(name for secret in secrets for name in secret_names(secret.value)):
        if name not in known:
            has = f"it has {some_of(known)}" if known else "it has none"
            text = f"the configuration has no secret {name!r} (egress.secrets; {has}), so no session gets these hosts"
            yield Problem((*path, "secrets"), text)
    if secrets and BACKENDS_WITHOUT_SECRETS.issuperset(served):
        text = f"the {' and '.join(served)} backend sets no headers, so no session gets these hosts"
        yield Problem((*path, "secrets"), text)
    if profile.network.ask and BACKENDS_WITHOUT_SECRETS.issuperset(served):
        text = f"the {' and '.join(served)} backend does not hold connections for an approval, so no session is made"
        yield Problem((*path, "ask"), text)


def _unserved_packages(table: PackagesTable, path: KeyPath, config: Config) -> Iterator[Problem]:
    for key, has_any in (("allowed", table.allows_any), ("ask", table.asks_any)):
        if has_any and not config.environments.has_own_index:
            text = 'the configuration has no index of its own (environments.index_url), so "*" allows nothing'
            yield Problem((*path, key), text)
