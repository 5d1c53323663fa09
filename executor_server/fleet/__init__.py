"""Many machines behind one address: front, nodes, Ray.

`membership` decides, `api` is the gRPC services, `daemons` builds front and nodes, `ray` makes machines. It must not
know the command line. Read `membership/members.py` first. It exports nothing: the program that starts a daemon for Ray
(`ray/detach.py`) must not import the rest, which takes two thirds of a second of a processor.
"""
