"""The contract of a backend, and the code that backends share: teardown, settings, users, system call filters.

It also owns the packed guest, and the confinement of a process: its user and its filter. Each backend is a package of
its own (`local`, `docker`, `e2b`), knows none of the others and keeps its SDK to itself. No backend knows sessions,
clients or policies.
"""

from executor_server.backends.base import Backend, HostFinding, KnownSandbox, MachineSandbox, MissingSandbox, Sandbox
from executor_server.backends.environments import (
    BuildMounts,
    BuildSandboxes,
    Environment,
    Environments,
    Interpreter,
    Target,
)
from executor_server.backends.host_sweeper import HostSweeper
from executor_server.backends.seccomp_program import UnsupportedArchitecture, filter_program
from executor_server.backends.settings import CA_BUNDLE, egress_environment
from executor_server.backends.syscall_arguments import Alternatives, Argument
from executor_server.backends.teardown import failures_of, outcomes_of
from executor_server.backends.users import unlisted_uid
