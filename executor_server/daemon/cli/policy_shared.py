"""Parts of the commands that explain a policy: reading it, and showing refusals with the lines behind them.

A policy that can't be used ends the process with sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from executor_server.core.config import Config, ConfigError, read_bytes
from executor_server.daemon.cli.shared import EXIT_CONFIG, fail
from executor_server.policy import Policy, PolicyFile, built_in_policy, parse_policy, policy_for
from executor_server.policy.explain.explanation import PolicyText

T = TypeVar("T")


def read_policy(file: Path | None, config: Config) -> tuple[Path | None, bytes, PolicyFile]:
    """Reads the named file, else the configuration's, else the built-in policy, which has no text."""
    path = file or config.policy.file
    if path is None:
        return None, b"", built_in_policy()
    data = _checked(path, lambda: read_bytes(path, "policy file"))
    return path, data, _checked(path, lambda: parse_policy(data, path))


def parsed_policy(path: Path) -> PolicyFile:
    return _checked(path, lambda: parse_policy(read_bytes(path, "policy file"), path))


def policy_text(data: bytes, file: PolicyFile, config: Config, config_path: Path | None) -> PolicyText:
    """Returns the policy of the configured daemon, with the texts that lines are found in.

    Without a configuration file it is that of a daemon which has every image and every secret that the policy names.
    """
    if config_path is None:
        return PolicyText(_policy_of_any_daemon(file, config), data.decode())
    config_text = read_bytes(config_path, "configuration file").decode()
    return PolicyText(policy_for(file, config), data.decode(), config_text)


def fail_policy(path: Path | None, problems: Sequence[str]) -> NoReturn:
    listed = "\n".join(f"  {line}" for line in problems)
    fail(EXIT_CONFIG, f"The policy {path or 'built in'} can't be used:\n{listed}")


def _policy_of_any_daemon(file: PolicyFile, config: Config) -> Policy:
    named = [image for profile in file.profiles.values() for image in profile.sandbox.images or ()]
    return policy_for(file, config, more_images=named, knows_secrets=False)


def _checked(path: Path, read: Callable[[], T]) -> T:
    try:
        return read()
    except ConfigError as error:
        fail_policy(path, error.problems)
