"""Refuses files of settings that another user could have written.

A user who can write the policy file can grant himself any right, and the configuration names the policy file. So both
are used only if nobody but root and the daemon's own user could have written them. That depends on the rights of the
file, and of its directory, where it could be replaced.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path


def untrusted(descriptor: int, path: Path) -> str | None:
    """Returns why the open file is untrusted, and the remedy, as the end of a sentence; None if it is trusted.

    A read-only mounted file is trusted whatever its owner, since only a user who may mount could put it there.
    Containers get files of the host like this, and user ids differ inside.
    """
    if os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        return None
    found = os.fstat(descriptor)
    owners = (os.geteuid(), 0)
    if found.st_uid not in owners:
        return f"belongs to user {found.st_uid}, not to this one or to root; run: chown {os.geteuid()} {path}"
    if _others_write(found):
        return f"can be written by other users; run: chmod go-w {path}"
    # A link can be replaced in its own directory, and its target in the directory of that.
    for directory in dict.fromkeys((path.parent, path.resolve().parent)):
        found = directory.stat()
        if found.st_uid not in owners:  # even where it is sticky
            return (
                f"is in {directory}, a directory of user {found.st_uid}, who could replace it; move it to a directory "
                "of this user or of root"
            )
        if _others_write(found) and not found.st_mode & stat.S_ISVTX:
            return (
                f"is in a directory that other users can write, so they could replace it; run: chmod go-w {directory}"
            )
    return None


def _others_write(found: os.stat_result) -> bool:
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _is_private_group(found.st_gid, found.st_uid)


def _is_private_group(gid: int, uid: int) -> bool:
    """True if the group is its user's own. With such groups the umask is 002, so the group may write all files."""
    try:
        user, group = pwd.getpwuid(uid), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
