"""Adds the sandbox's environment to an interpreter: packages that the image lacks, or has in other versions.

They come behind the standard library and ahead of the image's own, as in a virtual environment. Its `.pth` files may
run any code, so this happens in the interpreter's process, which agent code is going to have anyway, never in the
supervisor.
"""

from __future__ import annotations

import os
import site

from ..wire.paths import ENVIRONMENT_PROGRAMS, ENVIRONMENT_SITE


def add_environment() -> None:
    """Makes the environment's packages and programs known to this process and to those that it starts.

    Called before `site.main`, which adds those of the image.
    """
    site.addsitedir(ENVIRONMENT_SITE)
    _put_ahead("PATH", ENVIRONMENT_PROGRAMS, os.defpath)
    # For other processes of Python: the programs of the environment, and those that agent code starts.
    _put_ahead("PYTHONPATH", ENVIRONMENT_SITE, "")


def _put_ahead(variable: str, directory: str, default: str) -> None:
    others = os.environ.get(variable, default)
    os.environ[variable] = f"{directory}{os.pathsep}{others}" if others else directory
