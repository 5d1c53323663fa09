"""Imports gRPC with its log off: our errors report failures, so they need not appear on stderr.

Every module of the client imports gRPC from here, because gRPC reads its log level at the first import. An existing
GRPC_VERBOSITY, or an earlier import, takes precedence. The variable is removed after the import, so that child
processes do not inherit it.
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

# Both import gRPC themselves, so they must follow.
from grpc.experimental import ChannelOptions as ChannelOptions  # noqa: E402

from executor_api.v1 import admin_service_pb2_grpc as admin_service_pb2_grpc  # noqa: E402
from executor_api.v1 import executor_service_pb2_grpc as executor_service_pb2_grpc  # noqa: E402
