"""Decides what a client may have: profiles, tenants, limits, images, imports, tools, hosts, packages.

It owns the policy file, the one place that makes a `SandboxSpec`, and the texts of refusals. Decisions are pure; the
policy in force is replaced as a whole when its file changes. It must not know sessions, backends or the wire.
`policy.explain` serves the command line and operators.
"""

from executor_server.policy.check import configured_images, policy_for, secrets_named, unserved, unserved_profiles
from executor_server.policy.decide import Policy, WarmSandboxes
from executor_server.policy.file import PolicyFile, built_in_policy, load_policy, parse_policy
from executor_server.policy.grants import PolicySummary
from executor_server.policy.in_force import WATCH_INTERVAL_S, PolicyListener, PolicyStore
from executor_server.policy.lock_file import copy_of
from executor_server.policy.packages import PackagesSummary
from executor_server.policy.profile import QuotasTable
from executor_server.policy.requested import RequestedLimits, RequestedSession
from executor_server.policy.session_rules import (
    check_branch,
    check_file_get,
    check_file_put,
    check_port,
    check_process,
    check_savepoint,
    check_state_export,
    check_state_restore,
    check_tools,
    execution_limits,
    host_to_ask,
    tool_to_ask,
)
