"""`executor env build`, and the package environments of new sessions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from executor_client._core.package_modules import patterns_of, without_refused
from executor_client._core.terminal import aligned
from executor_client.cli import EXIT_SUCCEEDED
from executor_client.cli.console import Console
from executor_client.cli.package_files import packages_of
from executor_client.client import ExecutorClient
from executor_client.errors import InvalidRequest, PolicyViolationError
from executor_client.session import Session


def build(client: ExecutorClient, options: argparse.Namespace, console: Console) -> int:
    """Builds an environment from the packages of files and options, and shows its contents."""
    packages = [*options.packages, *(package for file in options.files for package in packages_of(file))]
    if not packages:
        raise InvalidRequest("nothing to build: pass a FILE, or packages with --with")
    environment = client.prepare_environment(dict.fromkeys(packages), options.image, backend=options.backend)
    console.end_wait()
    rows = [("environment", environment.environment_id), ("size", f"{environment.size_bytes:,} bytes")]
    console.show_lines(aligned([*rows, ("packages", ", ".join(environment.pins))]))
    return EXIT_SUCCEEDED


def modules_of(client: ExecutorClient, options: argparse.Namespace, console: Console) -> tuple[str, ...]:
    """Waits for the environment of a new session, and returns its modules; none if the policy refuses it.

    The session may still get it, after an approval.
    """
    try:
        environment = client.prepare_environment(options.packages, options.image, ask=False)
    except PolicyViolationError:
        return ()
    console.end_wait()
    return environment.modules


def authorize(session: Session, modules: Sequence[str]) -> None:
    """Authorizes the modules of the environment, as far as the policy allows."""
    patterns = patterns_of(modules)
    while patterns:
        try:
            session.authorize_imports(patterns)
            return
        except PolicyViolationError as refusal:
            patterns = without_refused(patterns, refusal)
