"""The egress proxy's core: names, addresses, rules, and the proxy itself over sockets that it is given.

The daemon's egress process runs it for sandboxes of this host, and the root part of a machine in the cloud runs it
there. So it is Python 3.9 and needs only the standard library and h11. It must not know where its listeners come from,
nor what a tenant or a policy is: it gets rules by session id. It imports nothing else of the guest.
"""
