"""The calls between the front and the nodes of a fleet, on a connection on which both have shown certificates of it.

It owns their messages' form and who is refused a link. It must not know how nodes are chosen or leases counted: that is
in `executor_server.fleet.membership`.
"""
