"""Imports gRPC with its own log off: failures are reported by our errors, and not on stderr as well.

Every module of the client imports gRPC from here, because gRPC reads its log level once, when it is first imported. A
GRPC_VERBOSITY that is set, or an earlier import, takes precedence. The variable is removed again after the import, so
that no child process inherits it.
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

# Both import gRPC themselves, so they are taken from here too: an import that came first would leave its log on.
from grpc.experimental import ChannelOptions as ChannelOptions  # noqa: E402

from executor_api.v1 import executor_service_pb2_grpc as executor_service_pb2_grpc  # noqa: E402
