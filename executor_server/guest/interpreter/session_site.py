"""Lets pip and uv install packages while the session runs, in a sandbox with a network.

They install into a directory of the sandbox's own, which ends with it, and which is ahead of the environment and the
image: the version that was installed last counts, as in a virtual environment. By default they take wheels only, which
run nothing when they are installed. None of this is a wall. Code can fetch and unpack whatever its network lets
through, so which packages can get here is decided by the hosts that the policy allows.

Without a network nothing can be installed, and the installers try only once.
"""

from __future__ import annotations

import os
import sys

DIRECTORY = "/tmp/.packages"
_UV_CONFIG = "uv/uv.toml"
_UV_SETTINGS = f'[pip]\ntarget = "{DIRECTORY}"\nonly-binary = [":all:"]\n'  # a target has no variable
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


def prepare_installers(*, has_network: bool, ahead_of: int) -> None:
    """Sets the variables of pip and uv for all that this process starts; with a network also the directory.

    `ahead_of` is its index in `sys.path`.
    """
    for name, value in {**_ALWAYS, **(_WITH_NETWORK if has_network else _WITHOUT_NETWORK)}.items():
        os.environ.setdefault(name, value)
    if not has_network:
        return
    try:
        # Now, since Python remembers of a directory on its path that it is not there.
        os.makedirs(DIRECTORY, exist_ok=True)
        _write_uv_settings()
    except OSError:
        return  # the disk is full: nothing could be installed
    sys.path.insert(ahead_of, DIRECTORY)
    for variable, directory in (("PYTHONPATH", DIRECTORY), ("PATH", f"{DIRECTORY}/bin")):
        others = os.environ.get(variable, os.defpath if variable == "PATH" else "")
        os.environ[variable] = f"{directory}{os.pathsep}{others}" if others else directory


def _write_uv_settings() -> None:
    path = os.path.join(os.environ.get("XDG_CONFIG_HOME", "/tmp/.config"), _UV_CONFIG)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(path, "x") as file:
            file.write(_UV_SETTINGS)
    except FileExistsError:
        return  # an earlier interpreter of this sandbox wrote it
