"""Makes sandboxes, and keeps some ready: the warm pool, fail-over among backends, their health, the creation queue.

It must not know sessions: it hands over a sandbox with a connected guest and forgets it.
"""

from executor_server.sessions.pool.asked_kinds import AskedSettings
from executor_server.sessions.pool.creation_queue import CreationQueue
from executor_server.sessions.pool.fail_over import BackendSet, FailOverSettings
from executor_server.sessions.pool.kind import PoolStats, ReadySandbox
from executor_server.sessions.pool.pool import PoolSettings, WarmPool
