"""The egress proxy's process, `python -m executor_server.network.proxy`: the part of the daemon that sandboxes talk to.

It owns the certificate authority's key, the secrets, name resolution and the termination of TLS; the proxy itself is
guest/egress. It parses hostile bytes and holds credentials, so it has nothing else: no daemon module is imported here
except the wire's and guest/egress (a linter contract holds that), and it knows neither tenants nor policies.
"""

from executor_server.guest.egress.host_resolver import HostResolver
from executor_server.guest.egress.own_addresses import OwnAddresses
from executor_server.network.proxy.link import Link
from executor_server.network.proxy.resolvers import DnsResolver
