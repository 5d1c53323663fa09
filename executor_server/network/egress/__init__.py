"""The way out of sandboxes: the daemon's end of the egress proxy.

It owns the proxy's process, and binds a session's rules to its sandbox's listener. It must not know sessions, policies
or backends: it gets a listener, rules and an id, and reports events. Read `interface.py` first, then `service.py`.
"""

from executor_server.network.egress.interface import Egress, EgressError, EgressSettings, EgressSink, RemoteListener
from executor_server.network.egress.secret_files import open_secrets
from executor_server.network.egress.service import EgressService
from executor_server.network.egress.trial import try_connection
