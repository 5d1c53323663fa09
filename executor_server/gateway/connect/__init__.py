"""ExecutorService over HTTP: Connect, plain JSON, `/v1/run`, and their description.

Forwards calls to the daemon with the caller's own token. It must not know E2B's protocol.
"""

from executor_server.gateway.connect.app import connect_app
