"""The part of the host's system that every sandbox sees: libraries, data that libraries read, and a few tools.

A sandbox needs the system for Python: shared libraries, time zones, fonts, terminal descriptions. Programs that agents
write also run `sh`, `ls`, `grep`, `tar` or `git`, so those are there, and editors for people who have a terminal in a
session. Compilers, database servers, administration tools and everything else on the host are missing, as is
/usr/local. The network clients are `curl` and `git`, which use the variables for the egress proxy: if a
session has a network, agents expect them, and otherwise they reach nothing. Others (ssh, nc, dig) could reach nothing
in either case, and wget verifies with its own list of CAs. The tools are copied into one directory, because a mount for
each of a hundred files would double the time to make a sandbox. All sandboxes share it, with a network or without.

A program can read the host's path of a mounted file in /proc/self/mountinfo. So the daemon keeps the files that
sandboxes mount at paths that reveal nothing about the host or its users, if it has such a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHOWN_DIRECTORIES = tuple(
    Path(name)
    for name in (
        *("/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/libexec/git-core", "/usr/share"),
        *("/lib", "/lib32", "/lib64", "/libx32"),
    )
)
"""Directories that every sandbox sees, read-only and as they are on the host. Not all of them are on every host."""

TOOL_DIRECTORIES = (Path("/usr/bin"), Path("/bin"))
"""Directories of the tools inside a sandbox; the tools come from the host's."""

SYSTEM_PREFIX = Path("/usr")
"""The prefix of the system's own Python, which has its parts in the directories above."""

GUARANTEED_TOOLS = _names(
    """
    [ awk base64 basename bash cat chmod cksum cmp comm cp csplit cut date dd df diff dirname du echo egrep env expand
    expr false fgrep find fmt fold free getconf getent grep groups gunzip gzip head hostname iconv id install join kill
    ldd link ln locale ls md5sum mkdir mkfifo mktemp mv nice nl nohup nproc numfmt od paste pathchk pgrep pidof pkill pr
    printenv printf ps pwd readlink realpath rm rmdir sed seq setsid sh sha1sum sha256sum sha512sum shuf sleep sort
    split stat stdbuf stty sum sync tac tail tar tee test timeout top touch tput tr true truncate tsort tty uname
    unexpand uniq unlink uptime wc which whoami xargs yes zcat
    """
)
"""Tools of every sandbox. `check-host` names those that the host lacks."""

OTHER_TOOLS = _names(
    """
    b2sum base32 bunzip2 bzcat bzip2 clear column curl dash diff3 dir fc-list fc-match file flock gawk getopt git
    hexdump infocmp jq ldconfig less logname mawk more nano patch rev script sdiff sha224sum sha384sum strings time tree
    tset unlzma unxz unzip unzstd uuidgen vdir vi vim watch xxd xz xzcat zip zipinfo zstd zstdcat
    """
)
"""Tools of sandboxes on hosts that have them."""

# Python by any name, since virtual environments are made from it; not its tools, such as python3-config.
_PYTHON = re.compile(r"python([0-9.]+)?")
_SOURCES = (*TOOL_DIRECTORIES, Path("/usr/sbin"), Path("/sbin"))
_MAX_TOOL_BYTES = 64 * 1024 * 1024
_HASH_CHARS = 16


def build_tools(directory: Path) -> Path:
    """Makes the /usr/bin of all sandboxes, with copies of the host's tools as they are now. Blocks for a moment.

    Its name is a hash of the tools, and an existing one is never changed: sandboxes may have it mounted.
    """
    found = dict(_find_tools())
    versions = sorted((name, str(path), _version(path)) for name, path in found.items())
    tools = directory / f"bin-{hashlib.sha256(repr(versions).encode()).hexdigest()[:_HASH_CHARS]}"
    if not tools.exists():
        with tempfile.TemporaryDirectory(prefix=".bin-", dir=directory) as scratch:
            made = Path(scratch, "bin")
            made.mkdir()
            _copy_tools(made, found)
            made.chmod(0o755)
            publish(made, tools)
    return tools


def missing_tools() -> list[str]:
    """Returns the guaranteed tools that this host lacks."""
    return sorted(GUARANTEED_TOOLS - dict(_find_tools()).keys())


def publish(made: Path, path: Path) -> None:
    """Moves a directory to `path`, unless another daemon has put the same there meanwhile."""
    try:
        made.rename(path)
    except OSError:
        if not path.is_dir():
            raise


def _find_tools() -> Iterator[tuple[str, Path]]:
    seen: set[str] = set()
    for directory in _SOURCES:
        try:
            names = sorted(entry.name for entry in directory.iterdir())
        except OSError:  # not on this host
            continue
        for name in names:
            if name in seen or not (name in GUARANTEED_TOOLS or name in OTHER_TOOLS or _PYTHON.fullmatch(name)):
                continue
            real = Path(os.path.realpath(directory / name))
            try:
                status = real.stat()
            except OSError:  # a link to nowhere
                continue
            if stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_TOOL_BYTES and os.access(real, os.R_OK):
                seen.add(name)
                yield name, real


def _version(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def _copy_tools(made: Path, found: Mapping[str, Path]) -> None:
    """Copies each file once and links its other names. The copies lack the bits that would run them as another user."""
    copies: dict[Path, Path] = {}
    for name, real in sorted(found.items()):
        if real in copies:
            os.link(copies[real], made / name)
        else:
            copies[real] = Path(shutil.copyfile(real, made / name))
            (made / name).chmod(0o755)


def neutral_directory(otherwise: Path) -> Path:
    """Returns a directory for mounted files whose path says nothing about the host; `otherwise` when there is none."""
    if os.geteuid() == 0:
        candidates = [Path("/var/cache/executor")]
    else:
        candidates = [Path(runtime, "executor") for runtime in [os.environ.get("XDG_RUNTIME_DIR", "")] if runtime]
    for candidate in candidates:
        try:
            candidate.mkdir(mode=0o700, exist_ok=True)
            status = candidate.lstat()
            may_execute = not os.statvfs(candidate).f_flag & os.ST_NOEXEC
        except OSError:
            continue
        # Another user who could write there could put programs into sandboxes.
        closed = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if stat.S_ISDIR(status.st_mode) and closed and may_execute and os.access(candidate, os.W_OK):
            return candidate
    return otherwise
