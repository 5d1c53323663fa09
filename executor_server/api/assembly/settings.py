"""Turns the configuration into the settings of the daemon's parts, which do not know the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from executor_server.api import MAX_PROBES, PeerSocket, ServerSettings, TlsFiles, held_calls
from executor_server.backends import Backend, Environments
from executor_server.backends.local import LocalBackend
from executor_server.core import checked_with_optional, unix_address
from executor_server.core.config import BackendName, Config, ServerSection, StateDir
from executor_server.policy import Policy, PolicyFile, policy_for, unserved_profiles
from executor_server.policy.audit import AuditFiles, AuditSettings
from executor_server.policy.identity import Tokens
from executor_server.policy.quotas import Capacity
from executor_server.sessions import SessionSettings
from executor_server.sessions.pool import AskedSettings, BackendSet, FailOverSettings, PoolSettings

RECOVERY_S = 15.0
"""Seconds that a starting daemon waits for the sandboxes of an earlier one."""

_log = structlog.get_logger(__name__)


def backends_of(
    config: Config,
    egress_bundle: Callable[[], Path] | None = None,
    environments: Callable[[], Environments] | None = None,
) -> list[Backend]:
    """Returns the configured backends, not started yet.

    `egress_bundle` returns the certificate authorities for sandboxes with a network, `environments` the environments
    for sandboxes with packages. Without them no such sandboxes can be made.
    """
    return [_backend(config, name, egress_bundle, environments) for name in config.server.backends]


def joined(backends: Sequence[Backend]) -> Backend:
    """Returns a backend that acts for all of these."""
    if len(backends) == 1:
        return backends[0]
    return BackendSet(backends, FailOverSettings(adopt_wait_s=RECOVERY_S))


def _backend(
    config: Config,
    name: BackendName,
    egress_bundle: Callable[[], Path] | None,
    environments: Callable[[], Environments] | None,
) -> Backend:
    if name == "docker":
        # Imported here, because the SDK is slow to import and not installed everywhere.
        from executor_server.backends.docker import DockerBackend

        return DockerBackend(
            config.server.state_dir, config.docker, egress_bundle=egress_bundle, environments=environments
        )
    if name == "e2b":
        from executor_server.backends.e2b import E2BBackend

        # Without configured authorities, the template's are enough, since no TLS is terminated in the cloud.
        own = egress_bundle if config.egress.ca_file is not None else None
        return E2BBackend(
            config.server.state_dir,
            config.e2b,
            egress_bundle=own,
            environments=environments,
            max_archive_bytes=config.environments.max_archive_bytes,
        )
    return LocalBackend(
        config.server.state_dir,
        config.local.images,
        bwrap=config.local.bwrap,
        egress_bundle=egress_bundle,
        environments=environments,
    )


def policy_of(config: Config, file: PolicyFile) -> Policy:
    """Makes the policy of this daemon. Raises ConfigError when the pool asks for more than the policy grants."""
    policy = policy_for(file, config)
    policy.warm_sandboxes(config.pool)
    for problem in unserved_profiles(file, config):
        _log.warning("policy_not_served", problem=str(problem))
    return policy


def audit_files(config: Config) -> AuditFiles:
    audit = config.audit
    return AuditFiles(
        config.audit_directory,
        max_file_bytes=audit.max_file_bytes,
        max_files=audit.max_files,
        anchor_after_sync=audit.sync == "always",
    )


def audit_settings(config: Config) -> AuditSettings:
    return AuditSettings(sync=config.audit.sync)


def pool_settings(config: Config) -> PoolSettings:
    has_pool = config.pool.size or config.pool.warm
    asked = AskedSettings() if has_pool else AskedSettings(max_kinds=0)
    return PoolSettings(ping_interval_s=config.sessions.ping_interval_s, asked=asked)


def session_settings(config: Config) -> SessionSettings:
    sessions = config.sessions
    return SessionSettings(
        max_sessions=sessions.max_sessions,
        journal_bytes=sessions.journal_bytes,
        journal_total_bytes=sessions.journal_total_bytes,
        ping_interval_s=sessions.ping_interval_s,
        silence_s=sessions.silence_s,
        recovery_s=RECOVERY_S,
    )


def capacity_of(config: Config, policy: Callable[[], Policy], tokens: Tokens, max_sessions: int) -> Capacity:
    """Returns what tenants share: the sessions, and the server's calls without those for probes and held refusals."""
    calls = config.server.max_concurrent_calls

    def is_shared() -> bool:
        # Checked for each call. There may be thousands of tenants, so the union comes last.
        listed, with_token = policy().tenants, tokens.tenants
        return len(listed) > 1 or len(with_token) > 1 or len(listed | with_token) > 1

    return Capacity(max(1, calls - held_calls(calls) - MAX_PROBES), max_sessions, is_shared)


def server_settings(config: Config) -> ServerSettings:
    """Raises AddressError."""
    server = config.server
    tls = None
    if server.tls_cert is not None and server.tls_key is not None:
        tls = TlsFiles(cert=server.tls_cert, key=server.tls_key, client_ca=server.tls_client_ca)
    listen, problems = checked_with_optional(config.listen_addresses, config.unasked_addresses, has_tls=tls is not None)
    for problem in problems:
        _log.warning("address_not_served", problem=problem)
    return ServerSettings(
        listen=listen,
        unasked=config.unasked_addresses,
        tls=tls,
        max_concurrent_calls=server.max_concurrent_calls,
        peer_socket=_peer_socket(server),
    )


def _peer_socket(server: ServerSection) -> PeerSocket | None:
    if server.peer_socket is None:
        return None
    inner = StateDir(server.state_dir).inner_socket_path
    return PeerSocket(outer=unix_address(server.peer_socket), inner=unix_address(inner))
