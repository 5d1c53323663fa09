"""The gateway: HTTP for any language, and E2B's protocol for software that already speaks it.

The gateway is a process of its own and an ordinary client of the daemon (`executor_client`). It has no rights of its
own: each request carries its caller's token.
"""
