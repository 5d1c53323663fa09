"""Two commits, measured in turns on one machine: `make bench-compare BASE=<commit>`.

The same rows, those of the commit that compares, are run in two processes: each has the client, the daemon and the
packages of its own commit. It knows nothing of what a row measures, and rows know nothing of it.
"""
