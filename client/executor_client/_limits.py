"""The client's own limits: how much it accepts from a daemon and how long it tries. Each has a name and a unit.

What a sandbox may send is in `executor_api.limits`, which it is held to.
"""

from __future__ import annotations

from executor_api.limits import PIECE_BYTES as PIECE_BYTES

# What may be sent.
CODE_BYTES_MAX = 1 << 20
INLINE_BYTES_MAX = 262_144
"""A packed value above this travels as a blob."""
INLINE_BYTES_PER_MESSAGE_MAX = 2 << 20
"""All inline values of one message together stay well below gRPC's 4 MiB."""
TOOL_ERROR_CHARS_MAX = 10_000

# What is accepted of one execution. Past any of these the daemon, or what is behind it, is not to be trusted.
MESSAGES_MAX = 2_000_000
LOG_CHARS_MAX = 256 << 20
TOOL_CALLS_WAITING_MAX = 1_000
IMAGE_PIXELS_MAX = 64_000_000
"""Of one image."""
IMAGES_PIXELS_MAX = 192_000_000
"""Of all images of one execution: decoded they take up to four bytes a pixel."""
FILE_BYTES_MAX = 1 << 30
STATE_BYTES_MAX = 512 << 20
"""The state of a session; it is held in memory."""
ARCHIVE_ENTRIES_MAX = 10_000
"""Of a directory that is put or got."""

# What is accepted of a description of a session or a policy.
NAMES_LISTED_MAX = 65_536
"""Of one list: imports, images, tools. A policy file has room for no more."""

# How long, how often.
EVALUATION_TIMEOUT_S = 10.0
"""Of an expression, where the session's own limit is not below that."""
CONNECT_TIMEOUT_S = 5.0
"""For a daemon never heard of. Where it is certain that none is there, only a time that the caller gave is waited."""
PROBE_TIMEOUT_S = 3.0
"""Seconds that each step of finding out why nobody answers may take."""
CALL_TIMEOUT_S = 120.0
TRANSFER_BYTES_PER_S_MIN = 1 << 20
"""A file may take as long as this rate takes, over the time of any call."""
RECONNECT_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 10.0
CANCEL_GRACE_S = 5.0
"""How long an interrupted `execute` waits for the end of what it cancelled."""
LEASE_RENEW_FIRST_S = 10.0
"""Until the daemon has said how often it wants to hear of a lease."""
LEASE_RENEW_MIN_S = 0.2
LEASE_RETRY_S = 2.0
"""When a lease could not be renewed."""
LEASE_TICK_S = 2.0
"""So long after this machine slept a lease that is due is renewed at the latest."""
LEASE_CALL_TIMEOUT_S = 5.0
LEASE_UNENDED_MAX = 1024
TAKE_BACK_WAIT_S = 1.0
"""How long an interrupted `create_session` waits for the end of what it asked for, which goes on in the background."""
EXIT_TIMEOUT_S = 2.0
"""How long the end of the interpreter waits for the ends of all leases."""
TOOLS_GRACE_S = 2.0
"""How long `close` waits for host tools that still run."""
BUSY_TIMEOUT_S = 30.0
"""How long a call goes on asking a daemon that has no room for it now and says when to ask again."""
BUSY_SPREAD = 0.25
"""So much of the time that the daemon named is added at random: many may have been told the same."""
IMAGE_TIMEOUT_S = 600.0
"""How long the making of a session goes on asking a daemon that fetches the image."""
IMAGE_RETRY_MAX_S = 15.0
"""A daemon that wants to be asked for an image later than this is not fetching it now: it could not, a moment ago."""
BACKOFF_FIRST_S = 0.02
BACKOFF_MAX_S = 2.0
REATTACH_FOR_GAPS_MAX = 1
WAIT_TOLD_AFTER_S = 1.0
"""A wait that is over earlier is told to nobody."""
WAIT_TOLD_EVERY_S = 15.0
"""So often at last; at first more often."""
WAIT_REASON_CHARS_MAX = 300
TOOL_NAME_SHOWN_MAX = 100
"""In characters: the name is the program's."""
MAX_CONCURRENT_TOOLS = 8
ARGUMENT_BYTES_COMPARED_MAX = 16_384
"""Bytes of a call's arguments, packed: larger ones are not compared with what a host tool has left of them."""
CALLS_COMPARED_MAX = 100
"""In one session: a tool that changes its arguments does so early."""
KEEPALIVE_TIME_S = 330
"""Above the five minutes below which gRPC servers take pings for abuse."""
KEEPALIVE_TIMEOUT_S = 20


def transfer_timeout_s(call_timeout_s: float, size_bytes: int) -> float:
    """How long a call that carries a file may take."""
    return call_timeout_s + size_bytes / TRANSFER_BYTES_PER_S_MIN
