"""Imports gRPC so that its own log stays silent: what goes wrong is said in our errors, and not on stderr besides.

Each module of the client that needs gRPC has it from here, since gRPC reads its log level once, when it is imported.
Who has set GRPC_VERBOSITY, or has imported gRPC before us, has chosen; and what is set here for a moment is not left to
the processes that this one starts.
"""

from __future__ import annotations

import os
import sys

_VARIABLE = "GRPC_VERBOSITY"

if "grpc" in sys.modules or _VARIABLE in os.environ:
    import grpc as grpc
else:
    os.environ[_VARIABLE] = "NONE"
    try:
        import grpc as grpc
    finally:
        del os.environ[_VARIABLE]
