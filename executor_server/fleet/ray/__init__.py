"""A fleet on Ray: an actor for the front and one on each of Ray's nodes, which start or adopt the daemons there.

Ray knows the machines, restarts the actors, and adds machines. A daemon is not a child of Ray: it has a session, a
state directory and a pid file of its own, and never imports Ray, which unpickles. So no daemon and no session ends with
an actor, a raylet or Ray's head. Only this package imports Ray. It must not place sessions nor decide that a node is
lost: the front does both.

The command line imports `commands` and `layout` itself: the program that starts a daemon (`detach`) must not import the
fleet and its configuration, which takes two thirds of a second of a processor.
"""

from executor_server.fleet.ray.daemon import FleetError
