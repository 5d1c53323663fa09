"""The egress proxy's process, `python -m executor_server.network.proxy`, to which sandboxes connect.

It owns the certificate authority's key, the secrets, name resolution and the termination of TLS; the proxy itself is
guest/egress. It parses hostile bytes and holds credentials, so it has nothing else: it imports no daemon module except
the wire's and guest/egress (an import contract checks this), and knows neither tenants nor policies. Read `server.py`
first.
"""

from executor_server.guest.egress.host_resolver import HostResolver
from executor_server.guest.egress.own_addresses import OwnAddresses
from executor_server.network.proxy.link import Link
from executor_server.network.proxy.resolvers import DnsResolver
