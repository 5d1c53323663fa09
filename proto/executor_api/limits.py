"""Limits that both ends of a connection hold to: one table for guest, daemon and client.

The sender keeps within a limit, and reports what it left out or refused because of it. The receiver accepts everything
that the limits allow; a peer that exceeds them is broken or hostile. Numbers that stood in two places would drift
apart, and an honest program would be refused for the size of its output.

Constants only, for CPython 3.9 and later: this module is imported at the start of every sandbox.
"""

from __future__ import annotations

_MIB = 1 << 20

PIECE_BYTES = 256 << 10
"""Bytes of the largest piece of a blob, a file or a state, and of the largest payload that is sent inline."""
VALUE_BYTES_MAX = 128 * _MIB
"""Bytes of one packed value; the default of `ValueLimits.total_bytes`."""
OUTPUT_VALUE_BYTES_MAX = 4 * _MIB
"""Bytes of the packed value of a step. A larger one is described; `evaluate` and `get_variables` deliver it whole."""
OUTPUT_NODES_MAX = 100_000
"""Values in the value of a step, when they are not of one type of number or text."""
OUTPUT_PIXELS_MAX = 4_000_000
"""Pixels of the images in the value of a step, whose packing takes a second for ten million."""
BLOB_BYTES_MAX = 256 * _MIB
"""Bytes of one payload that is sent as a blob, and of all blobs that a session has staged at one time."""

# Requests.
CODE_BYTES_MAX = _MIB
"""Bytes of the code of one execution, or of the source of one tool."""
IDENTIFIER_CHARS_MAX = 256
"""Characters of the name of a variable, a tool, a parameter or a module."""
PATH_BYTES_MAX = 4096
"""Bytes of a path in a sandbox."""
VARIABLES_NAMED_MAX = 1024
"""Variables that one SetVariables or GetVariables request may name."""
TOOLS_MAX = 256
TOOL_PARAMETERS_MAX = 256
TOOL_MODULES_MAX = 256
"""Modules that one shipped tool may say it needs."""
TOOLS_SHIPPED_BYTES_MAX = 32 * _MIB
"""Bytes of code and data of all shipped tools of one registration."""

# Events of one execution.
IMAGES_MAX = 64
IMAGE_BYTES_MAX = 32 * _MIB
IMAGES_BYTES_MAX = 256 * _MIB
"""Bytes of all images together; the client holds them until the result arrives."""
DISPLAYS_MAX = 256
"""Objects that an execution shows by display data, whose bytes are counted with those of images."""
DISPLAY_BYTES_MAX = 8 * _MIB
DISPLAY_TYPES_MAX = 16
"""MIME types of the display data of one object."""
TOOL_CALLS_OPEN_MAX = 64
TOOL_ARGUMENTS_BYTES_MAX = 256 * _MIB
"""Bytes of the arguments of all calls that are open at one time."""
TOOL_ERROR_ARGUMENTS_BYTES_MAX = 64 << 10
"""Bytes of the packed arguments of a tool's exception; without them its message is its only argument."""
EXECUTION_BLOBS_BYTES_MAX = IMAGES_BYTES_MAX + TOOL_ARGUMENTS_BYTES_MAX + VALUE_BYTES_MAX
"""Bytes that a client may have to hold for one execution; the last part is its output."""
EXECUTION_BLOBS_OPEN_MAX = TOOL_CALLS_OPEN_MAX
"""Blobs that have begun and that no message has named yet."""
ARTIFACTS_MAX = 256

# Processes.
ARGUMENTS_MAX = 65_536
ARGUMENTS_BYTES_MAX = 2 * _MIB
"""Bytes of a command's arguments, the program and a NUL after each included."""
ARGUMENT_BYTES_MAX = 131_071
"""Bytes of one of them: Linux accepts 32 pages of 4 KiB, including a NUL."""
WRITE_BYTES_MAX = 64 * 1024
"""Bytes of one message to a process's input."""
SESSION_NAME_CHARS_MAX = 64

# Answers.
DIRECTORY_ENTRIES_MAX = 10_000
"""Files and directories of one directory that is listed, put or got."""
EXCLUDED_MAX = 256
EXCLUDED_BYTES_MAX = 64 << 10
"""Names and paths that an archive leaves out, and their bytes together."""
VARIABLES_MAX = 2048
"""Variables of a GetVariables answer when the request names none."""
VARIABLES_BYTES_MAX = 512 * _MIB
"""Bytes of all values of a GetVariables answer."""

SAVEPOINTS_MAX = 64
"""Savepoints that a session may have at one time, whatever the policy says."""
SAVEPOINT_NUMBER_MAX = 2**31 - 1
