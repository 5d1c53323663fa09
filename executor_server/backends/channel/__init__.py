"""The daemon's end of the channel to the guest in a sandbox.

It owns connecting, sending with acknowledgement, and the conversion of a guest's frames into the daemon's values, with
each field checked. It must not know sessions, nor which backend made the sandbox.
"""

from executor_server.backends.channel.daemon_channel import READY_TIME_S, GuestChannel
from executor_server.backends.channel.endpoint import (
    GuestEndpoint,
    RefusedError,
    SocketEndpoint,
    UnreachedError,
    first_token,
)
from executor_server.backends.channel.events import PROCESS_EVENTS, read_event, read_process_event, read_result
from executor_server.backends.channel.guest_requests import (
    Request,
    VariablesReply,
    changes_part,
    described_file,
    file_part,
    listed_savepoints,
    listing,
    missing_modules,
    nothing,
    variables_part,
    written_bytes,
)
from executor_server.backends.channel.tool_packing import BlobDigests, packed_tools
from executor_server.guest.wire.messages import MAX_PAYLOAD_BYTES
from executor_server.guest.wire.tools import MAX_SHIPPED_BYTES
