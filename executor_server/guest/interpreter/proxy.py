"""Has a library use the egress proxy that does not do so by itself.

The proxy is named by environment variables, which urllib, requests, httpx, websockets, pip, git and curl read. Of the
widely used libraries for Python only aiohttp ignores them, unless each of its sessions is made with `trust_env=True`.
"""

from __future__ import annotations

import sys


def heed_proxy() -> None:
    """Makes `trust_env=True` the default of aiohttp's sessions, once the program or a library has imported it."""
    session = getattr(sys.modules.get("aiohttp"), "ClientSession", None)
    defaults = getattr(getattr(session, "__init__", None), "__kwdefaults__", None)
    if isinstance(defaults, dict) and "trust_env" in defaults:
        defaults["trust_env"] = True
