"""The packages of a sandbox as values: what the policy approved, and the progress of making an environment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PackagesSpec:
    """The approved packages of a sandbox, from which its environment is made. Only the policy makes one.

    With one image, equal specs mean the same environment until its lock is due for renewal.
    """

    requirements: tuple[str, ...]  # by PEP 508, canonical, sorted, each distribution once; empty: all of the lock
    lock_file: str = ""  # path of the policy's lock file (PEP 751); empty: uv resolves
    lock_sha256: str = ""  # digest of its content when the policy was read, in hex
    exclude_newer_s: float | None = None  # seconds before now; newer files in the index don't count
    max_environment_bytes: int = 4 * 2**30


@dataclass(frozen=True)
class Progress:
    """The progress of something that a client waits for, for a person to read."""

    step: str  # "resolving", "installing", "first import"
    done: int = 0
    total: int = 0  # 0: not known
    unit: str = ""  # the plural of what is counted: "packages"

    def __str__(self) -> str:
        """Returns "installing, 17 of 23 packages"."""
        return f"{self.step}, {self.done:,} of {self.total:,} {self.unit}".rstrip() if self.total else self.step
