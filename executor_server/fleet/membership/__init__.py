"""Many daemons as one: what a front and its nodes agree on, and what each of them decides.

It owns leases and epochs, the front's knowledge of its nodes, placement, and the use of tenants over all nodes. Most of
it takes the time as an argument and does no I/O, so that a simulation can run it with any network. It must not know
gRPC: the calls between front and nodes are in `fleet.api`. Read members.py and heartbeat.py first.
"""

from executor_server.fleet.membership.certificates import (
    CERTIFICATE_NAME,
    DAYS,
    FRONT,
    KEY_NAME,
    MAX_DAYS,
    CertificateError,
    Credentials,
    Issued,
    Member,
    SignedCertificate,
    accept_certificate,
    authority_expire_time,
    is_certified,
    issue_front,
    issue_node,
    member_in,
    member_of,
    read_credentials,
    renew_front,
    request_certificate,
    sign_request,
)
from executor_server.fleet.membership.discovery import Discovery, node_address
from executor_server.fleet.membership.heartbeat import Heartbeat, NodeRecord
from executor_server.fleet.membership.ids import MAX_EPOCH, epoch_of, is_node_name, new_session_id, node_of
from executor_server.fleet.membership.members import (
    TICK_S,
    KnownNode,
    Link,
    Lost,
    Members,
    MemberState,
    Whereabouts,
)
from executor_server.fleet.membership.messages import (
    MAX_BACKENDS,
    MAX_IMAGES,
    MAX_LABEL_CHARS,
    MAX_LABELS,
    MAX_LOAD,
    MAX_LOCKS,
    MAX_LOCKS_BYTES,
    MAX_NODE_SESSIONS,
    MAX_NODE_TENANTS,
    MAX_NUMBER,
    MAX_PROBLEM_CHARS,
    MAX_VERSION_CHARS,
    MAX_WARM_KINDS,
    PROTOCOL,
    Control,
    FrontHello,
    NodeBackend,
    NodeHello,
    NodeReport,
    NodeSession,
    Renewal,
    TenantUse,
    WarmKind,
    fingerprint_of,
)
from executor_server.fleet.membership.parking import Parked, Parking
from executor_server.fleet.membership.placement import Nowhere, Placement, Wanted, score
from executor_server.fleet.membership.reservations import Earlier, Reservations
from executor_server.fleet.membership.session_index import Creation
from executor_server.fleet.membership.store import FleetStore, Tombstone
from executor_server.fleet.membership.timing import MARGIN_S, NodeRefused, Timing, lease_clock
from executor_server.fleet.membership.usage import FleetUsage
