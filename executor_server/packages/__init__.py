"""Environments: directories of packages, made once from a lock, outside any session, checked, and mounted read-only.

It owns their store on disk, the requests that they answer, and the steps of a build: resolving, installing and the
first import, each in a sandbox of its own (a build sandbox). It must not know sessions, clients or policies: it gets
approved packages and does not decide who may have them. Read `service.py` first.
"""

from executor_server.packages.build import Builder, Built, OnProgress, UvBuilder
from executor_server.packages.build_queue import EnvironmentSettings
from executor_server.packages.catalog import Collected, Evicted
from executor_server.packages.disk import Places
from executor_server.packages.lock import Lock
from executor_server.packages.observer import (
    BuildEnd,
    EnvironmentObserver,
    EnvironmentUse,
    Outcome,
    current_requester,
    requested_by,
)
from executor_server.packages.service import BuildInfo, EnvironmentInfo, EnvironmentService, Statistics
from executor_server.packages.uv import ForeignPython, foreign_python
from executor_server.packages.uv_sandboxes import BuildSettings, BuildSlot
from executor_server.packages.wheels import Wheels
