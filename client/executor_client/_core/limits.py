"""The client's limits: how much it accepts from a daemon, and how long it tries.

Limits that both ends must agree on are in `executor_api.limits`.
"""

from __future__ import annotations

# Requests.
INLINE_BYTES_PER_MESSAGE_MAX = 2 << 20
"""All inline values of one message; gRPC's limit of a message is 4 MiB. Other values are sent as blobs."""
TOOL_ERROR_CHARS_MAX = 10_000
MAX_CONCURRENT_TOOLS = 8

# Answers to one execution. A daemon or sandbox that exceeds one of these is not trustworthy.
MESSAGES_MAX = 2_000_000
LOG_CHARS_MAX = 256 << 20
TOOL_CALLS_WAITING_MAX = 1_000
IMAGE_PIXELS_MAX = 64_000_000
"""Pixels of one image."""
IMAGES_PIXELS_MAX = 192_000_000
"""Pixels of all images of one execution: a decoded one takes up to four bytes a pixel."""
REATTACH_FOR_GAPS_MAX = 1
"""How often the client reattaches to an execution because an event was missing."""

# Names of sessions.
NAME_RACES_MAX = 4
"""Attempts to find or create a named session that other clients keep creating and ending."""

# Other answers.
FILE_BYTES_MAX = 1 << 30
STATE_BYTES_MAX = 512 << 20
"""Bytes of a session's state, which is held in memory."""

# Reaching the daemon.
CONNECT_TIMEOUT_S = 5.0
"""Seconds to wait for a daemon that has never answered. The default is no wait if there certainly is none."""
PROBE_TIMEOUT_S = 3.0
"""Seconds for each step of the diagnosis why no daemon answers."""
RECONNECT_TIMEOUT_S = 60.0
KEEPALIVE_TIME_S = 330
"""Seconds between pings; gRPC servers treat more than one in five minutes as abuse."""
KEEPALIVE_TIMEOUT_S = 20

# Calls.
CALL_TIMEOUT_S = 120.0
TRANSFER_BYTES_PER_S_MIN = 1 << 20
"""The slowest accepted rate of a transfer, which extends the timeout of calls with files."""
RECORDING_TIME_S = 600.0
"""Seconds that the transfer of one recording may take."""
EVALUATION_TIMEOUT_S = 10.0
"""Seconds for an expression, unless the session's own limit is lower."""
CLOSE_TIMEOUT_S = 10.0
CANCEL_GRACE_S = 5.0
"""Seconds that an interrupted `execute` waits for its cancelled execution to end."""
TAKE_BACK_WAIT_S = 1.0
"""Seconds that an interrupted `create_session` waits until the session has ended in the background."""
INTERRUPT_GRACE_S = 2.0
"""Seconds between the SIGINT and the SIGKILL of an interrupted `processes.run`."""
TOOLS_GRACE_S = 2.0
"""Seconds that `close` waits for running host tools."""

# Retries.
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 2.0
WATCH_AGAIN_S = 2.0
"""Seconds between two attempts to watch again, after the daemon went away."""
BUSY_TIMEOUT_S = 30.0
"""Seconds that a call is repeated while the daemon has no capacity and names a time to retry."""
BUSY_SPREAD = 0.25
"""Largest fraction of the daemon's retry time that is added at random: many clients may have received the same time."""
IMAGE_TIMEOUT_S = 600.0
"""Seconds that the creation of a session is repeated while the daemon fetches the image or makes the environment."""
BUILD_RETRY_MIN_S = 0.2
"""Least seconds between two requests for an environment that is being built, or for a session whose node is away."""
IMAGE_RETRY_MAX_S = 15.0
"""A daemon that names a longer time to retry is not fetching the image: its last attempt failed."""

# Approvals.
APPROVAL_WAIT_MAX_S = 3_700.0
"""Seconds that a request is repeated while it waits for an approval; a policy denies it after an hour at most."""
APPROVALS_MAX = 1_024
"""Waiting requests of one list."""
APPROVAL_TEXT_CHARS_MAX = 512
APPROVAL_DETAIL_CHARS_MAX = 1_024
APPROVALS_CONNECT_S = 5.0
"""Seconds that the first session waits until the client is connected as an approver."""
APPROVAL_ENDED_CHECK_S = 0.2
"""Seconds between checks that a request still waits, while the client awaits its answer."""

# The lease of a client.
LEASE_RENEW_FIRST_S = 10.0
"""Seconds between renewals until the daemon has set the interval."""
LEASE_RENEW_MIN_S = 0.2
LEASE_RETRY_S = 2.0
"""Seconds between a failed renewal and the next attempt."""
LEASE_TICK_S = 2.0
"""Longest delay of a renewal that became due while the machine slept."""
LEASE_CALL_TIMEOUT_S = 5.0
LEASE_UNENDED_MAX = 1024
EXIT_TIMEOUT_S = 2.0
"""Seconds that the interpreter's exit waits for all leases to end."""

# Reports and hints.
WAIT_REPORTED_AFTER_S = 1.0
"""A shorter wait is not reported."""
WAIT_REPORTED_EVERY_S = 15.0
"""Seconds between the reports of a long wait; the first ones come more often."""
WAIT_REASON_CHARS_MAX = 300
TOOL_NAME_SHOWN_MAX = 100
"""Characters of a tool's name in messages: the program chose the name."""
ARGUMENT_BYTES_COMPARED_MAX = 16_384
"""Bytes of a call's packed arguments; larger ones are not compared after the call."""
CALLS_COMPARED_MAX = 100
"""Calls of one session whose arguments are compared: a tool that changes arguments does so early."""


def transfer_timeout_s(call_timeout_s: float, size_bytes: int) -> float:
    """Returns the timeout of a call that transfers this many bytes."""
    return call_timeout_s + size_bytes / TRANSFER_BYTES_PER_S_MIN
