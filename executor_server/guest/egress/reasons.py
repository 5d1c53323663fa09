"""The closed list of reasons why the proxy refuses or ends connections, as they stand in records, audit and metrics."""

from __future__ import annotations

# Refusals, before anything was sent upstream.
BAD_REQUEST = "bad_request"  # not HTTP, or HTTP that can be read in two ways
BAD_NAME = "bad_name"  # a host that is not a valid name
ADDRESS_LITERAL = "address_literal"  # an IP address where a name is expected
NOT_ALLOWED = "not_allowed"
DENIED = "denied"  # named by the policy's list of denied hosts
NOT_APPROVED = "not_approved"  # it needs an approval, which was denied or did not come
HEAD_TIMEOUT = "head_timeout"
HEAD_TOO_LARGE = "head_too_large"
TOO_MANY_CONNECTIONS = "too_many_connections"
TOO_MANY_NEW = "too_many_new_connections"
SENT_BYTES = "sent_bytes"
RECEIVED_BYTES = "received_bytes"
TENANT_QUOTA = "tenant_quota"
UNRESOLVED = "unresolved"
RESOLVER_TIMEOUT = "resolver_timeout"
REFUSED_ADDRESS = "refused_address"
UNREACHED = "unreached"
SERVER_NAME = "server_name"  # the ClientHello names another host, none, or can't be read
OLD_TLS = "old_tls"
UPSTREAM_CERTIFICATE = "upstream_certificate"
AMBIGUOUS_PATH = "ambiguous_path"
MISDIRECTED = "misdirected"  # a Host header that is not the connection's name
SECRET_MISSING = "secret_missing"  # a header needs a secret that the proxy does not have
PROXY_FAILED = "proxy_failed"  # our bug

# Ends of connections that were made.
ENDED = "ended"  # by either side, in order
BROKEN = "broken"
TIME_LIMIT = "connection_time"
RULE_GONE = "rule_gone"
SESSION_ENDED = "session_ended"
PROXY_ENDED = "proxy_ended"

_ONLY_ENDS = frozenset({ENDED, BROKEN, TIME_LIMIT, RULE_GONE, SESSION_ENDED, PROXY_ENDED})
REFUSALS = frozenset(value for name, value in globals().items() if name.isupper() and name[0] != "_") - _ONLY_ENDS
# The second and third lines: refusals of what came through a connection that was made.
ENDS = frozenset(
    {SENT_BYTES, RECEIVED_BYTES, TENANT_QUOTA}
    | {BAD_REQUEST, HEAD_TIMEOUT, HEAD_TOO_LARGE, UNREACHED, SERVER_NAME, OLD_TLS, MISDIRECTED}
    | {UPSTREAM_CERTIFICATE, AMBIGUOUS_PATH, PROXY_FAILED}
    | _ONLY_ENDS
)
