"""The gRPC services of a front, and the mutually authenticated calls between it and its nodes.

It owns the form of their messages, and the links. It must not decide which node is lost or best: that is in
`executor_server.fleet.membership`. Read proxy.py for a call's way to its node, front_link.py for a link.
"""
