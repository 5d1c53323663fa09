"""The egress proxy's core: names, addresses, rules, and the proxy itself over sockets that it is given.

The daemon's egress process runs it for sandboxes of this host; the root part of a machine in the cloud runs the same
code there. So it is Python 3.9, and needs the standard library and h11 only. It must not know where its listeners come
from, nor what a session, a tenant or a policy is: it is given rules by an id. It imports nothing else of the guest.
"""
