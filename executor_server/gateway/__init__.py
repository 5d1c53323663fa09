"""The gateway: HTTP for any language, and E2B's protocol for software that already speaks it.

A process of its own and a plain client of the daemon: it imports `executor_client` and holds no power of its own.
Each request carries its caller's token.
"""
