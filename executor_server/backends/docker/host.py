"""Which Engine: the configured one, $DOCKER_HOST's, else this host's; and whether it can be one of ours at all."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SOCKET = Path("/var/run/docker.sock")

_UNIX = "unix://"
_KNOCK_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class NoEngine(Exception):
    """Why there is none for us, and what would change that: a sentence each."""

    detail: str
    remedy: str


def engine_socket(configured: str | None, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket of the Engine. Raises NoEngine when it is elsewhere or does not answer there."""
    host = configured or environ.get("DOCKER_HOST") or f"{_UNIX}{DEFAULT_SOCKET}"
    if not host.startswith(_UNIX):
        raise NoEngine(
            f"The Engine at {host} is not on this host: a sandbox is reached by a Unix socket in a directory that "
            "both the daemon and the sandbox see.",
            "Run executor-server on the Engine's host, and let clients connect to it over the network.",
        )
    path = Path(host.removeprefix(_UNIX))
    knock(path)
    return path


def knock(path: Path) -> None:
    """Connects once: the kernel says more precisely than any library what is wrong. Blocks; raises NoEngine."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise NoEngine(f"{path} is not a socket.", "Set docker.host, or DOCKER_HOST, to the Engine's socket.")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_KNOCK_TIMEOUT_S)
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
    except (BlockingIOError, TimeoutError):  # its queue is full: it has taken no connection for long
        raise NoEngine(f"The Engine at {path} takes no connections.", "See whether it is well: docker info.") from None
    except OSError as error:
        raise NoEngine(f"The Engine's socket {path} can't be used: {error}.", "Set docker.host to another.") from error
