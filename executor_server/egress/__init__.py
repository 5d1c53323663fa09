"""The way out of sandboxes: the daemon's end of the egress proxy, and the proxy's process.

It owns the process, its authority and secrets, and the binding of a session's rules to its sandbox's listener. It must
not know sessions, policies or backends: it is given a listener, rules and an id, and reports what happened.
"""
