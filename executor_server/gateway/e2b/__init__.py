"""E2B's protocol: sandboxes over REST, and what their clients find inside a sandbox.

A sandbox is a detached session. `records` keeps the sandboxes, and authenticates their traffic. `envd` has the Connect
services of E2B's daemon in a sandbox.

The gateway refuses requests for what it does not offer with 501 and the reason. It ignores nothing that a caller could
rely on.
"""
