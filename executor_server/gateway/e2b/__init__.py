"""E2B's protocol: sandboxes over REST, and what their clients find inside a sandbox.

A sandbox is a detached session. `records` has the one file that says which session is which sandbox, and authenticates
the traffic of a sandbox. `errors` has the form of refusals and the table of statuses. `envd` has the Connect services
of E2B's daemon in a sandbox.

A request for something that is not offered is refused with 501 and the reason. Nothing that a caller could rely on is
silently ignored.
"""
