"""Environments that are made by hand: directories as the daemon's own builder leaves them, and the seam that serves them."""

from __future__ import annotations

import csv
import io
import stat
from collections.abc import Collection, Mapping
from pathlib import Path

from executor_server.backends.environments import Environment, Target
from executor_server.core.errors import SandboxFailure
from executor_server.core.packages import PackagesSpec
from tests.support.package_index.index import PackageIndex
from tests.support.package_index.wheels import Entry, make_wheel

PACKAGES = PackagesSpec(("greeting",))
ENVIRONMENT_ID = "env-made-by-hand"
# `numpy` stands for a package that the image has in another version. The `.pth` file leaves a mark where it runs.
MARK = "/tmp/mark-of-a-pth-file"
FILES = {
    "greeting/__init__.py": "import os\nfrom greeting.words import WORD\n\ndef greet():\n    return os.getpid() and WORD\n"
    "def fail():\n    raise ValueError('from the environment')\n",
    "greeting/words.py": "WORD = 'hello'\n",
    "numpy/__init__.py": "import _decimal\n__version__ = '0.0.1'\n",
    "marked.pth": f"import sys; sys.marked = sys.marked + 1 if hasattr(sys, 'marked') else 1; "
    f"open({MARK!r}, 'w').close()\n",
    "greeting-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: greeting\nVersion: 1.2\n",
    "greeting-1.2.dist-info/entry_points.txt": "[console_scripts]\ngreet = greeting:greet\n",
    "bin/greet": "#!/bin/sh\nexec python3 -c 'import greeting; print(greeting.greet(), greeting.__file__)'\n",
}


def offer(index: PackageIndex) -> None:
    """Has an index offer PACKAGES, of which the daemon's own builder makes an environment with these files."""
    for project, version, requires in (("greeting", "1.2", ["numpy==0.0.1"]), ("numpy", "0.0.1", [])):
        files = {name: text for name, text in FILES.items() if name.startswith(f"{project}/")}
        extra = []
        if project == "greeting":
            files["marked.pth"] = FILES["marked.pth"]
            script = FILES["bin/greet"].encode()
            extra = [Entry("greeting-1.2.data/scripts/greet", script, stat.S_IFREG | 0o755)]
        index.add(make_wheel(project, version, files, requires=requires, extra=extra))


def make_environment(directory: Path, files: Mapping[str, str] = FILES) -> Path:
    """Writes an environment into the directory and returns it."""
    site = directory / "site"
    for name, text in files.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.startswith("bin/") else 0o644)
    for info in site.glob("*.dist-info"):
        written = io.StringIO()
        csv.writer(written).writerows((name, "", "") for name in files)
        (info / "RECORD").write_text(written.getvalue())
    for path in (directory, *directory.rglob("*/")):
        path.chmod(0o755)
    return directory


class ServedEnvironments:
    """Implements `Environments` with one environment, made when it is first asked for.

    Holds are files, so that another daemon of the state directory knows them.
    """

    def __init__(self, state_dir: Path) -> None:
        self._directory = state_dir / "environments"
        self.targets: list[Target] = []

    @property
    def directory(self) -> Path:
        """The environment."""
        return self._directory / "ready" / ENVIRONMENT_ID

    @property
    def held(self) -> set[str]:
        """Ids of the sandboxes for which it is held."""
        return {path.name for path in self._holds()}

    async def ready(self, packages: PackagesSpec, target: Target) -> Environment:
        assert packages == PACKAGES
        self.targets.append(target)
        if not self.directory.exists():
            make_environment(self.directory)
        size_bytes = sum(path.stat().st_size for path in self.directory.rglob("*"))
        return Environment(ENVIRONMENT_ID, self.directory, size_bytes, ("greeting", "numpy"))

    def hold(self, environment_id: str, backend: str, sandbox_id: str) -> None:
        if environment_id != ENVIRONMENT_ID or not self.directory.exists():
            raise SandboxFailure(f"environment {environment_id} is gone")
        hold = self._directory / "holds" / backend / sandbox_id
        hold.parent.mkdir(parents=True, exist_ok=True)
        hold.touch()

    def release(self, sandbox_id: str) -> None:
        for hold in self._holds():
            if hold.name == sandbox_id:
                hold.unlink()

    def held_by(self, sandbox_id: str) -> str:
        return ENVIRONMENT_ID if sandbox_id in self.held else ""

    def keep_only(self, backend: str, sandbox_ids: Collection[str]) -> None:
        for hold in self._holds():
            if hold.parent.name == backend and hold.name not in sandbox_ids:
                hold.unlink()

    def _holds(self) -> list[Path]:
        return list(self._directory.glob("holds/*/*"))
