"""Programs that root runs in a cloud machine: one makes a sandbox's namespaces, one relays bytes to its guest.

They run outside the sandbox. They must not know what the relayed bytes mean.
"""
