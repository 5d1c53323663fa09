"""uv: which one the daemon uses, its command lines, and its output.

uv runs in build sandboxes only, without the host's configuration: `environment` returns all its environment variables,
and the index is the configured one. Nothing is built from source, since that would run a package's code with access to
the index, and only files with the hashes of a lock are installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from executor_server.backends import CA_BUNDLE, Interpreter, egress_environment
from executor_server.core import EnvironmentFailed, Progress, SandboxFailure
from executor_server.guest.wire.paths import PROGRAMS_PATH, WORK_PATH

UV_PATH = f"{PROGRAMS_PATH}/uv"
CACHE_PATH = f"{WORK_PATH}/cache"

# The minor versions of the manylinux platforms 2.x that uv knows. Wheels for an older one work, too.
_MANYLINUX = (17, 28, *range(31, 41))
_MACHINES = ("x86_64", "aarch64")
_VERSION_TIMEOUT_S = 20.0
_VERSION = re.compile(r"uv (\d+\.\d+\.\d+[0-9A-Za-z.+-]{0,32})")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_URL = re.compile(r"https?://[^\s`'\"<>)]+")
_INSIDE_PATH = re.compile(r"(?:/run/executor|/tmp|/workspace)(?:/[^\s`'\":,)]*)?")
_MAX_EXPLANATION_CHARS = 2000
_MAX_EXPLANATION_LINES = 30


class UvMissing(SandboxFailure):
    """No usable uv was found. The message says what to do; it is for the administrator."""


@dataclass(frozen=True)
class Uv:
    """The program, and the version that it reports."""

    path: Path
    version: str


def find_uv(configured: Path | None = None) -> Uv:
    """Returns the configured uv, else that of the daemon's own environment, else that on PATH.

    Blocks, and runs it once. Raises UvMissing.
    """
    problems = []
    for path in [configured] if configured is not None else _candidates():
        try:
            return Uv(path, _version_of(path))
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            problems.append(f"{path} cannot be used: {error}")
    raise UvMissing(
        "; ".join(problems)
        or "uv, which builds package environments, is missing: install remote-executor[server], "
        "or set uv in [environments]"
    )


def _candidates() -> Iterator[Path]:
    package = importlib.util.find_spec("uv")
    if package is not None:
        import uv

        with contextlib.suppress(FileNotFoundError):
            yield Path(uv.find_uv_bin())
    if found := shutil.which("uv"):
        yield Path(found)


def _version_of(path: Path) -> str:
    answer = subprocess.run(
        [path, "--version"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={"UV_NO_CONFIG": "1"},
        timeout=_VERSION_TIMEOUT_S,
        check=True,
    ).stdout
    match = _VERSION.match(answer)
    if match is None:
        raise ValueError("it does not answer like uv")
    return match[1]


def place_uv(uv: Uv, programs: Path) -> None:
    """Copies uv to the programs of build sandboxes, as a file that all users can run and none can change.

    Blocks. Replaces an older copy atomically. Raises OSError.
    """
    scratch = Path(tempfile.mkdtemp(prefix=".uv-", dir=programs))
    try:
        copy = scratch / "uv"
        shutil.copyfile(uv.path, copy)
        copy.chmod(0o555)
        copy.replace(programs / "uv")
    finally:
        shutil.rmtree(scratch)


@dataclass(frozen=True)
class ForeignPython:
    """The Python of a target that differs from the build sandbox's."""

    version: str  # "3.12"
    platform: str  # as uv calls it: "x86_64-manylinux_2_28"

    @property
    def interpreter(self) -> str:
        """The name of its kind in a lock."""
        return f"cpython-{self.version}"


def foreign_python(interpreter: Interpreter) -> ForeignPython:
    """Describes the Python of a cloud machine to uv. Raises EnvironmentFailed if uv has no platform for it."""
    version = ".".join(map(str, interpreter.version))
    if interpreter.machine in _MACHINES and interpreter.libc == "musl":
        return ForeignPython(version, f"{interpreter.machine}-unknown-linux-musl")
    known = [f"2_{minor}" for minor in _MANYLINUX if (2, minor) <= interpreter.libc_version]
    if interpreter.machine in _MACHINES and interpreter.libc == "glibc" and known:
        return ForeignPython(version, f"{interpreter.machine}-manylinux_{known[-1]}")
    raise EnvironmentFailed(
        "there are no packages for the machines of this image: their processor or C library is not supported"
    )


def environment(*, ca_bundle: str = CA_BUNDLE) -> dict[str, str]:
    """Returns all environment variables of uv."""
    return {
        **egress_environment(ca_bundle),
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "PATH": "/usr/bin:/bin",
        "UV_CACHE_DIR": CACHE_PATH,
        "UV_CONCURRENT_DOWNLOADS": "32",
        "UV_HTTP_TIMEOUT": "30",
        "UV_KEYRING_PROVIDER": "disabled",
        "UV_NO_CONFIG": "1",
        "UV_PYTHON_DOWNLOADS": "never",
    }


def compile_command(
    index_url: str, exclude_newer_s: float | None, foreign: ForeignPython | None, *, is_locked: bool = False
) -> list[str]:
    """Returns the command that resolves the requirements on its input, and prints the wheels (PEP 751).

    `is_locked`: the input has all packages with their versions.
    """
    newest: Sequence[str] = ()
    if exclude_newer_s is not None:
        moment = datetime.now(UTC) - timedelta(seconds=exclude_newer_s)
        newest = ("--exclude-newer", moment.strftime("%Y-%m-%dT%H:%M:%SZ"))
    return [
        *(UV_PATH, "pip", "compile", "-", "--format", "pylock.toml"),
        *("--generate-hashes", "--no-build", "--no-header", "--no-annotate", "--no-progress"),
        *("--default-index", index_url),
        *(("--no-deps",) if is_locked else ()),
        *newest,
        *_python_options(foreign),
    ]


def install_command(wheels: Sequence[str], target: str, foreign: ForeignPython | None) -> list[str]:
    """Returns the command that installs exactly the packages of the lock on its input, from directories of wheels."""
    return [
        *(UV_PATH, "pip", "install", "--requirements", "-", "--target", target),
        *("--require-hashes", "--no-deps", "--no-build", "--link-mode", "hardlink", "--no-progress"),
        *("--offline", "--no-index", *(f"--find-links={directory}" for directory in wheels)),
        *_python_options(foreign),
    ]


def _python_options(foreign: ForeignPython | None) -> Sequence[str]:
    own = ("--python", "{python}")  # the program that runs uv fills it in
    if foreign is None:
        return own
    return (*own, "--python-version", foreign.version, "--python-platform", foreign.platform)


# uv has the same exit code for these and all other errors, so its text decides. If the texts change, the only effect is
# that a temporary failure is not retried.
_PASSING = (
    "error sending request",
    "error decoding response body",
    "operation timed out",
    "Request failed after",
    "HTTP status server error",
    "HTTP status client error (403",  # the egress proxy's answer, too
    "HTTP status client error (429",
    "os error 28",  # the disk is full
    "tcp connect error",
    "dns error",
)
_PROGRESS = ("Using CPython", "Using Python", "Resolved ", "Prepared ", "Installed ", "Downloading ", "warning: ")


@dataclass
class Listener:
    """Follows uv's output: progress for a person, and the text of its errors."""

    step: str
    total: int = 0  # packages; 0: unknown
    said: list[str] = field(default_factory=list)

    def take(self, line: str) -> Progress | None:
        """Takes a line; returns the progress if it has changed."""
        line = _ANSI.sub("", line)
        if len(self.said) < 400:
            self.said.append(line)
        return self.progress(self.total) if line.startswith("Installed ") else None

    def progress(self, done: int) -> Progress:
        return Progress(self.step, min(max(done, 0), self.total), self.total, "packages")

    @property
    def may_pass(self) -> bool:
        """True if the failure is not caused by the packages, but by the index, the network or the disk."""
        return any(cause in line for line in self.said for cause in _PASSING)

    @property
    def explanation(self) -> str:
        """uv's own explanation of its failure, for a client: cut, and without addresses and paths."""
        lines = [_cleaned(line) for line in self.said if not line.startswith(_PROGRESS)]
        text = "\n".join(line for line in lines if line)
        first = text.split("\n")[:_MAX_EXPLANATION_LINES]
        cut = "\n".join(first)[:_MAX_EXPLANATION_CHARS]
        return cut if len(cut) == len(text) else f"{cut} ..."


def _cleaned(line: str) -> str:
    line = _INSIDE_PATH.sub("(a file of the build)", _URL.sub("the index", line))
    return "".join(character for character in line if character.isprintable()).rstrip()
