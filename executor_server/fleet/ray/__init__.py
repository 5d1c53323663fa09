"""A fleet on Ray: an actor for the front and one on each of Ray's nodes, which start or adopt the daemons there.

Ray says which machines there are, starts the actors again, and makes more machines. A daemon is no child of Ray: it has
a session, a state directory and a pid file of its own, and it never imports Ray, which unpickles. So the end of an
actor, of a raylet or of Ray's head ends no daemon and no session. Only this package imports Ray. It must not place
sessions nor decide that a node is lost: the front does both.

The command line imports `commands` and `layout` itself: the program that starts a daemon (`detach`) must not import the
fleet and its configuration, which takes two thirds of a second of a processor.
"""

from executor_server.fleet.ray.daemon import FleetError
