"""Many daemons as one: what a front and its nodes agree on, and what each of them decides.

It owns leases and epochs, the front's knowledge of its nodes, placement, and the shares of quotas. All of it takes the
time as an argument and does no I/O, so that a simulation can run it with any network. It must not know gRPC: the calls
between front and nodes are in `rpc.fleet`.
"""
