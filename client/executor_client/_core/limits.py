"""The client's own limits: how much it accepts from a daemon, and how long it tries. Each has a name and a unit.

The limits that both ends must agree on are in `executor_api.limits`, and are not repeated here.
"""

from __future__ import annotations

# Requests.
INLINE_BYTES_PER_MESSAGE_MAX = 2 << 20
"""All inline values of one message together; gRPC's limit of a message is 4 MiB. The others travel as blobs."""
TOOL_ERROR_CHARS_MAX = 10_000
MAX_CONCURRENT_TOOLS = 8

# Answers to one execution. A daemon that passes any of these, or what is behind it, is not to be trusted.
MESSAGES_MAX = 2_000_000
LOG_CHARS_MAX = 256 << 20
TOOL_CALLS_WAITING_MAX = 1_000
IMAGE_PIXELS_MAX = 64_000_000
"""Pixels of one image."""
IMAGES_PIXELS_MAX = 192_000_000
"""Pixels of all images of one execution: a decoded one takes up to four bytes a pixel."""
REATTACH_FOR_GAPS_MAX = 1
"""Times that an execution is attached to again because an event was missing."""

# Names of sessions.
NAME_RACES_MAX = 4
"""Times that a named session is looked for, which others end and make meanwhile."""

# Other answers.
FILE_BYTES_MAX = 1 << 30
STATE_BYTES_MAX = 512 << 20
"""Bytes of a session's state, which is held in memory."""

# Reaching the daemon.
CONNECT_TIMEOUT_S = 5.0
"""Seconds for a daemon that has never answered. No time where it is certain that none is there, unless one was set."""
PROBE_TIMEOUT_S = 3.0
"""Seconds for each step of the diagnosis why no daemon answers."""
RECONNECT_TIMEOUT_S = 60.0
KEEPALIVE_TIME_S = 330
"""Seconds between pings; gRPC servers treat more than one in five minutes as abuse."""
KEEPALIVE_TIMEOUT_S = 20

# Calls.
CALL_TIMEOUT_S = 120.0
TRANSFER_BYTES_PER_S_MIN = 1 << 20
"""The slowest accepted rate of a transfer: a call that carries a file may take this much longer than any other."""
EVALUATION_TIMEOUT_S = 10.0
"""Seconds for an expression, unless the session's own limit is lower."""
CLOSE_TIMEOUT_S = 10.0
CANCEL_GRACE_S = 5.0
"""Seconds that an interrupted `execute` waits for the end of the execution that it cancelled."""
TAKE_BACK_WAIT_S = 1.0
"""Seconds that an interrupted `create_session` waits for the end of its session, which goes on in the background."""
INTERRUPT_GRACE_S = 2.0
"""Seconds for a command to end after the SIGINT of an interrupted `processes.run`, before all of it is killed."""
TOOL_THREAD_REST_S = 0.2
"""Seconds that the thread of a host tool waits for another call."""
TOOLS_GRACE_S = 2.0
"""Seconds that `close` waits for host tools that still run."""

# Retries.
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 2.0
BUSY_TIMEOUT_S = 30.0
"""Seconds that a call is repeated while the daemon has no capacity and names a time to retry."""
BUSY_SPREAD = 0.25
"""Random part of the daemon's retry time that is added to it, because many clients may have got the same time."""
IMAGE_TIMEOUT_S = 600.0
"""Seconds that the creation of a session is repeated while the daemon fetches the image or makes the environment."""
BUILD_RETRY_MIN_S = 0.2
"""Least seconds between two requests for an environment that is being made, more where the daemon says so; seconds
between two for a session whose node is away."""
IMAGE_RETRY_MAX_S = 15.0
"""A daemon that names a longer time to retry is not fetching the image now: its last attempt has failed."""

# The lease of a client.
LEASE_RENEW_FIRST_S = 10.0
"""Seconds between renewals until the daemon has said how often it wants them."""
LEASE_RENEW_MIN_S = 0.2
LEASE_RETRY_S = 2.0
"""Seconds to the next attempt after a renewal that failed."""
LEASE_TICK_S = 2.0
"""Seconds after which a lease that fell due while the machine slept is renewed at the latest."""
LEASE_CALL_TIMEOUT_S = 5.0
LEASE_UNENDED_MAX = 1024
EXIT_TIMEOUT_S = 2.0
"""Seconds that the exit of the interpreter waits for the ends of all leases."""

# Reports and hints.
WAIT_REPORTED_AFTER_S = 1.0
"""A shorter wait is not reported."""
WAIT_REPORTED_EVERY_S = 15.0
"""Seconds between the reports of a long wait; the first ones come more often."""
WAIT_REASON_CHARS_MAX = 300
TOOL_NAME_SHOWN_MAX = 100
"""Characters of a tool's name in a text: the name is the program's."""
ARGUMENT_BYTES_COMPARED_MAX = 16_384
"""Bytes of a call's packed arguments; larger ones are not compared with what a host tool has left of them."""
CALLS_COMPARED_MAX = 100
"""Calls of one session that are compared: a tool that changes its arguments does so early."""


def transfer_timeout_s(call_timeout_s: float, size_bytes: int) -> float:
    """Returns the seconds that a call that carries a file may take."""
    return call_timeout_s + size_bytes / TRANSFER_BYTES_PER_S_MIN
