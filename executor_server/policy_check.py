"""Whether a policy and a configuration go together: what the one grants and the other can't serve.

A daemon starts with such a policy, and warns: several daemons, of different backends, may share one file. For `policy
check`, which is asked about one configuration, these are problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from executor_server.config import Config
from executor_server.policy import Policy
from executor_server.policy_file import PolicyFile, Profile
from executor_server.settings import ConfigError, Problem, some_of


def configured_images(config: Config) -> tuple[str, ...]:
    """The images of the backend that is configured; the first is its default."""
    images = {
        "local": tuple(config.local.images),
        "docker": tuple(config.docker.images),
        "e2b": tuple(config.e2b.images),
    }
    return images[config.server.backend]


def policy_for(file: PolicyFile, config: Config, *, more_images: Sequence[str] = ()) -> Policy:
    """The policy as a daemon of this configuration would have it."""
    return Policy(
        file,
        images=tuple(dict.fromkeys((*configured_images(config), *more_images))),
        backend=config.server.backend,
        orphan_time_s=config.sessions.orphan_time_s,
    )


def unserved(file: PolicyFile, config: Config) -> list[Problem]:
    """What a daemon of this configuration can't serve, and what its pool asks for and is not granted."""
    problems = unserved_profiles(file, config)
    try:
        policy_for(file, config).warm_sandboxes(config.pool)
    except ConfigError as error:
        problems += [Problem((), text) for text in error.problems]
    return problems


def unserved_profiles(file: PolicyFile, config: Config) -> list[Problem]:
    """What profiles grant and a daemon of this configuration can't serve.

    What a profile only inherits is told of its ancestor.
    """
    problems = []
    for name, profile in file.profiles.items():
        parent = file.profiles.get(profile.extends) if profile.extends is not None else None
        inherited = () if parent is None else tuple(_unserved(profile.extends or "", parent, config))
        texts = {problem.text for problem in inherited}
        problems += [problem for problem in _unserved(name, profile, config) if problem.text not in texts]
    return problems


def _unserved(name: str, profile: Profile, config: Config) -> Iterator[Problem]:
    sandbox, backend = profile.sandbox, config.server.backend
    path = ("profiles", name, "sandbox")
    known = (*config.local.images, *config.docker.images, *config.e2b.images)
    for image in sandbox.images or ():
        if image not in known:
            allowed = some_of(dict.fromkeys(known))
            yield Problem((*path, "images"), f"the configuration has no image {image!r}; it has {allowed}")
    if backend not in sandbox.backends:
        yield Problem((*path, "backends"), f"the daemon's backend is {backend!r}, so it can serve no session of these")
    elif sandbox.images is not None and not set(sandbox.images) & set(configured_images(config)):
        allowed = some_of(configured_images(config))
        text = f"none is an image of the {backend} backend, so no session can be served; it has {allowed}"
        yield Problem((*path, "images"), text)
