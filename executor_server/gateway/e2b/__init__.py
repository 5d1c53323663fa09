"""E2B's protocol: sandboxes over REST, and what their clients find inside a sandbox.

`envd` has the Connect services of E2B's daemon in a sandbox.
"""
