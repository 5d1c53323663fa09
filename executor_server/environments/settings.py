"""The settings of the environments, which do not know the configuration."""

from __future__ import annotations

from dataclasses import dataclass

_DAY_S = 86_400.0


@dataclass(frozen=True)
class EnvironmentSettings:
    """The limits within which environments are made and kept ([environments] of the configuration)."""

    max_bytes: int = 20 * 2**30  # on disk, of everything: environments, cache, what is being made
    build_timeout_s: float = 600.0
    concurrency: int = 2
    lock_lifetime_s: float = 7 * _DAY_S
