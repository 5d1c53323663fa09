"""True when files that say what may be done could have been written by somebody else.

Whoever can write a policy file grants himself what he likes, and the configuration names the policy file. So both are
used only when nobody but the daemon's own user and root could have written them: by the rights of the file, and by
those of its directory, where another file could be put in its place.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def untrusted(descriptor: int, path: Path) -> str | None:
    """Why the open file should not be believed, and what to run: the end of a sentence. None when it can be.

    What is mounted read-only is believed whoever owns it: only who may mount could have put it there. That is how
    containers are given files of a host, whose users have other numbers inside.
    """
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return None
    found = os.fstat(descriptor)
    if found.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {found.st_uid}, not to this one or to root; run: chown {os.geteuid()} {path}"
    if _others_write(found):
        return f"can be written by other users; run: chmod go-w {path}"
    # A link can be exchanged where it lies, and what it leads to where that lies.
    for directory in dict.fromkeys((path.parent, path.resolve().parent)):
        found = directory.stat()
        if _others_write(found) and not found.st_mode & stat.S_ISVTX:
            return (
                f"lies in a directory that other users can write, who could put another in its place; run: "
                f"chmod go-w {directory}"
            )
    return None


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found.st_gid, found.st_uid)


def _is_private_group(gid: int, uid: int) -> bool:
    """True when a group is its user's alone. Where each user has one, the umask is 002: it may write all files."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
