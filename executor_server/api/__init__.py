"""The gRPC service: authentication, checks of requests, conversion, and the translation of errors to statuses.

Types of grpc and of the generated messages live here only. It must not decide anything that a policy or a quota says.
"""

from executor_server.api.admin import AdminService
from executor_server.api.admin_client import AdminClient, AdminEndpoint, AdminError, admin_client, is_own
from executor_server.api.asking import Asking
from executor_server.api.audit_view import AuditView
from executor_server.api.auth import MAX_PROBES
from executor_server.api.calls import held_calls
from executor_server.api.ended_sessions import EndedSessions
from executor_server.api.handlers import OWN_METHODS, Wrapper
from executor_server.api.meter import metering
from executor_server.api.peer_socket import PeerSocket
from executor_server.api.policy_view import PolicyView
from executor_server.api.server import RpcServer, ServerSettings, TlsFiles, refusals_to
from executor_server.api.service import ExecutorService
from executor_server.api.session_views import SessionViews
from executor_server.api.status import DaemonStatus
from executor_server.api.tracing import call_tracing, load_tracing
