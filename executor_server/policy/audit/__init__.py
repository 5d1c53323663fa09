"""The audit log: a chain of records. Events that need admission are recorded before they take place, others after.

It owns the form of records, the files and their anchor, and the verification of a log. It must not know how a refusal
to write is enforced: that is `policy.quotas`.
"""

from executor_server.policy.audit.chain import AuditKind, Position, as_ascii, read_fields
from executor_server.policy.audit.connection_trail import ConnectionTrail
from executor_server.policy.audit.directory import file_numbers, file_path, read_lines
from executor_server.policy.audit.fields import (
    of_code,
    of_command,
    of_execution,
    of_input,
    of_names,
    of_request,
    of_session,
    of_state,
    of_tools,
)
from executor_server.policy.audit.fleet_trail import FleetTrail
from executor_server.policy.audit.log import AuditLog, AuditSettings, AuditStats
from executor_server.policy.audit.log_files import AuditDirError, AuditFiles
from executor_server.policy.audit.tail import Found, Record, Wanted, search
from executor_server.policy.audit.trail import AuditTrail
from executor_server.policy.audit.verification import Finding, verify
