"""How much one side may send, and so what the other has to take: one table for guest, daemon and client.

Whoever sends sees to it that these hold, and says so where something is left out or refused over them. Whoever receives
takes all that they allow; past them, the other side is broken or hostile. A number that stood in two places would
drift apart, and an honest program would be refused for the size of what it shows.

Constants only, for CPython 3.9 and later: this is imported at the start of every sandbox.
"""

from __future__ import annotations

_MIB = 1 << 20

PIECE_BYTES = 256 << 10
"""The largest piece of a blob, and the largest payload that travels without one."""
VALUE_BYTES_MAX = 128 * _MIB
"""One packed value, as `ValueLimits.total_bytes` has it by default."""

# One execution.
IMAGES_MAX = 64
IMAGE_BYTES_MAX = 32 * _MIB
IMAGES_BYTES_MAX = 256 * _MIB
"""All images together. The client holds them until the result is there."""
TOOL_CALLS_OPEN_MAX = 64
TOOL_ARGUMENTS_BYTES_MAX = 256 * _MIB
"""The arguments of all calls that are open at one time."""
EXECUTION_BLOBS_BYTES_MAX = IMAGES_BYTES_MAX + TOOL_ARGUMENTS_BYTES_MAX + VALUE_BYTES_MAX
"""Bytes that a client may have to hold of one execution; the last part is its value."""
EXECUTION_BLOBS_OPEN_MAX = TOOL_CALLS_OPEN_MAX
"""Blobs that have begun and that no message has named yet."""
ARTIFACTS_MAX = 256

# One answer to GetVariables.
VARIABLES_NAMED_MAX = 1024
"""Names that a request may have; also of those that are set."""
VARIABLES_MAX = 2048
"""Variables that an answer may have, when none is named."""
VARIABLES_BYTES_MAX = 512 * _MIB
