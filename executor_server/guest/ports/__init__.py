"""Connections from the daemon to TCP ports that programs of the sandbox listen on.

It connects to the sandbox's own loopback and nowhere else, and passes bytes on as far as each end has room for them. It
must not know which program listens there, nor which client connects.
"""
