"""Chooses the Engine: the configured one, $DOCKER_HOST's, else this host's; and checks that its socket answers."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SOCKET = Path("/var/run/docker.sock")

_UNIX = "unix://"
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NoEngine(Exception):
    """There is no Engine that the backend could use. Both fields are sentences."""

    detail: str
    remedy: str


def engine_socket(configured: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the socket of the Engine. Raises NoEngine when it is not on this host or does not answer."""
    host = configured or environ.get("DOCKER_HOST") or f"{_UNIX}{DEFAULT_SOCKET}"
    if not host.startswith(_UNIX):
        raise NoEngine(
            f"The Engine at {host} is not on this host: a sandbox is reached by a Unix socket in a directory that "
            "both the daemon and the sandbox see.",
            "Run executor-server on the Engine's host, and let clients connect to it over the network.",
        )
    path = Path(host.removeprefix(_UNIX))
    check_answers(path)
    return path


def check_answers(path: Path) -> None:
    """Connects once: the kernel's errors are more precise than any library's. Blocks; raises NoEngine."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise NoEngine(f"{path} is not a socket.", "Set docker.host, or DOCKER_HOST, to the Engine's socket.")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_CONNECT_TIMEOUT_S)
            probe.connect(str(path))
    except FileNotFoundError:
        raise NoEngine(
            f"There is no Engine: {path} does not exist.",
            "Install Docker Engine and start it, or set docker.host, or DOCKER_HOST, to its socket.",
        ) from None
    except ConnectionRefusedError:
        raise NoEngine(f"No Engine listens on {path}.", "Start it: systemctl start docker.") from None
    except PermissionError:
        raise NoEngine(
            f"This user may not speak to the Engine: {path} refuses it.",
            "Add the user to the group that owns the socket (usermod -aG docker USER; it is as good as root), or run a "
            "rootless Engine.",
        ) from None
    except (BlockingIOError, TimeoutError):  # its queue is full: it has accepted no connection for a long time
        raise NoEngine(f"The Engine at {path} takes no connections.", "See whether it is well: docker info.") from None
    except OSError as error:
        raise NoEngine(f"The Engine's socket {path} can't be used: {error}.", "Set docker.host to another.") from error
