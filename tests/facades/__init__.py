"""Clients that speak E2B's protocol, each a program that runs against our gateway in an environment of its own.

clients.toml lists them; `nox -s facades` installs and runs each. A program prints nothing when all is as its client's users
expect, and fails otherwise. `python -m tests.facades COMMAND...` runs a command with a gateway, as nox does.
"""
