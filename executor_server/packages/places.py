"""The directories below the one of all environments. All are on one file system: things move between them by rename."""

from __future__ import annotations

from pathlib import Path


class Places:
    """Only the daemon's user can enter the root, so no other user of the host reaches any of them by a path.

    Inside a sandbox one of them is a mount of its own, which the sandbox's user can enter by its own mode.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ready = root / "ready"
        """The environments, each complete, checked and never changed."""
        self.staging = root / "staging"
        """Directories that are being made or removed. A start of the daemon empties it."""
        self.damaged = root / "damaged"
        """Environments that could not be verified. Each is removed when no sandbox has it."""
        self.work = root / "work"
        """A writable directory for each build sandbox that runs uv. A start of the daemon empties it."""
        self.programs = root / "programs"
        """The read-only directory of build sandboxes: uv, and the wheels."""
        self.wheels = self.programs / "wheels"
        """The files that the index sent (wheels.py)."""
        self.holds = root / "holds"
        """A file for each sandbox that has an environment."""
        self.index = root / "index.db"
        """The requests with the locks that answer them, and the last uses."""
