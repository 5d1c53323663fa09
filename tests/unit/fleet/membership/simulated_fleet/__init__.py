"""A fleet in virtual time: real leases, members, creations and shares; simulated processes, disks, clocks and network.

What is simulated is only what calls those classes, as the daemon does: it takes no decision of theirs.
"""
