"""Where an interpreter finds packages: the sandbox's environment, the image, and what the session itself installs.

The environment has packages that the image lacks, or has in other versions. They come behind the standard library and
ahead of the image's own, as in a virtual environment. The `.pth` files of both may run any code, so they are read in
the interpreter's process, which agent code will control anyway, never in the supervisor.

In a sandbox with a network, pip and uv install packages while the session runs, into a directory of the sandbox's own.
It ends with the sandbox and is ahead of the environment and the image: the version that was installed last counts. By
default they take wheels only, which run nothing when they are installed. None of this is a wall. Code can fetch and
unpack whatever its network lets through, so the hosts that the policy allows decide which packages can get here.
Without a network nothing can be installed, and the installers try only once.
"""

from __future__ import annotations

import os
import sys

from ..wire.paths import ENVIRONMENT_PROGRAMS, ENVIRONMENT_SITE, GUEST_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

DIRECTORY = "/tmp/.packages"
_UV_CONFIG = "uv/uv.toml"
_UV_SETTINGS = f'[pip]\ntarget = "{DIRECTORY}"\nonly-binary = [":all:"]\n'  # uv has no variable for a target
_WITHOUT_NETWORK = {"PIP_RETRIES": "0", "UV_HTTP_RETRIES": "0"}
_WITH_NETWORK = {
    "PIP_TARGET": DIRECTORY,
    "PIP_ONLY_BINARY": ":all:",
    "PIP_NO_CACHE_DIR": "1",  # the disk is small
    "PIP_RETRIES": "1",  # a host that the policy does not allow is refused each time
    "PIP_ROOT_USER_ACTION": "ignore",
    "UV_NO_BUILD": "1",
    "UV_PYTHON": sys.executable,
    "UV_PYTHON_DOWNLOADS": "never",
}
_ALWAYS = {
    # Debian's Python would answer with how to install for the whole system, which is read-only here.
    "PIP_BREAK_SYSTEM_PACKAGES": "1",
    "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    "PIP_NO_INPUT": "1",
    "UV_NO_PROGRESS": "1",
}
_site_path: Optional[list[str]] = None


def leave_archive() -> None:
    """Removes the guest's archive from `sys.path`: its packages know where their modules are."""
    if GUEST_PATH in sys.path:
        sys.path.remove(GUEST_PATH)


def add_environment() -> None:
    """Adds the environment's packages and programs. Called before `add_site`."""
    import site

    site.addsitedir(ENVIRONMENT_SITE)
    # For other processes of Python: the programs of the environment, and those that agent code starts.
    _put_ahead(ENVIRONMENT_SITE, ENVIRONMENT_PROGRAMS)


def prepare_installers(*, has_network: bool, ahead_of: int) -> None:
    """Sets the variables of pip and uv for all that this process starts; with a network also the directory.

    `ahead_of` is its index in `sys.path`.
    """
    for name, value in {**_ALWAYS, **(_WITH_NETWORK if has_network else _WITHOUT_NETWORK)}.items():
        os.environ.setdefault(name, value)
    if not has_network:
        return
    try:
        # Now, since Python remembers that a directory on its path is missing.
        os.makedirs(DIRECTORY, exist_ok=True)
        _write_uv_settings()
    except OSError:
        return  # the disk is full: nothing could be installed
    sys.path.insert(ahead_of, DIRECTORY)
    _put_ahead(DIRECTORY, f"{DIRECTORY}/bin")


def _put_ahead(modules: str, programs: str) -> None:
    for variable, directory, default in (("PYTHONPATH", modules, ""), ("PATH", programs, os.defpath)):
        others = os.environ.get(variable, default)
        os.environ[variable] = f"{directory}{os.pathsep}{others}" if others else directory


def _write_uv_settings() -> None:
    path = os.path.join(os.environ.get("XDG_CONFIG_HOME", "/tmp/.config"), _UV_CONFIG)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "x") as file:
            file.write(_UV_SETTINGS)
    except FileExistsError:
        return  # an earlier interpreter of this sandbox wrote it


def add_site() -> None:
    """Adds the image's packages to `sys.path`, as Python does at its start: once, also for the forks of this process.

    It runs code of the image (`.pth` files, sitecustomize).
    """
    global _site_path
    if _site_path is not None:
        sys.path += _site_path
        return
    import site

    before = list(sys.path)
    site.main()
    if sys.path[: len(before)] == before:
        _site_path = sys.path[len(before) :]
