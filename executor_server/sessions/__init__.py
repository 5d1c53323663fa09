"""Sessions: each is one client's interpreter in one sandbox, with its executions, requests and checkpoints.

It owns their creation, leases, lifetime and recovery after a restart. It must not know gRPC, metrics or configuration
files. Read `session.py` first, then `manager.py`.
"""

from executor_server.backends.channel import VariablesReply
from executor_server.sessions.manager import SessionManager
from executor_server.sessions.ports import PortConnection
from executor_server.sessions.recorder import Recorders, RecordingStats
from executor_server.sessions.session import Session
from executor_server.sessions.set_up import SessionRequest
from executor_server.sessions.shared import SessionHooks, SessionIds, SessionSettings
from executor_server.sessions.state_archive import StateArchives
